"""The same run again and again, and what its rounds show together. Values and pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from launcher.verdict.advice import about_rounds
from launcher.verdict.alone import minority
from launcher.verdict.results import Conclusion, Outcome, RunResult, Verdict, WorkerResult
from launcher.verdict.scope import max_rate
from model_check.errors import EXIT_DISAGREEMENT, EXIT_PASS, EXIT_UNNAMED, EXIT_USAGE
from model_check.utils.words import few

_PASSED = (Verdict.PASS, Verdict.WARN)
_FAILED = (Verdict.FAIL, Verdict.SUSPECT)
Bits = Mapping[int, int]
"""Step -> a digest of what its worker told of it."""


class Round(Outcome, frozen=True, kw_only=True):
    """One of them: a run of its own, in a directory of its own."""

    name: str
    culprits: list[str]


class Difference(Struct, frozen=True):
    """A worker gave other bits than in another round, in which nothing was wrong either."""

    worker: str
    rounds: list[str]
    """Those that differ from most; from the first, where no bits are those of most."""
    step: int
    """The first that differs."""
    is_minority: bool
    """Most of its rounds gave the same bits."""


class WorkerRounds(Struct, frozen=True, kw_only=True):
    """What became of one worker in all rounds."""

    name: str
    gpu: dict[str, Any] | None
    rounds: int
    """That it passed or failed; not those in which something else stopped it."""
    failed: list[str]
    """The rounds in which it failed, or was named."""
    rate: float | None
    """Failed rounds of all; None: there are none."""
    max_rate: float | None
    """Where none failed: with a confidence of 95 %, a smaller share does; 3 / rounds. None: too few
    rounds to tell, or some failed."""
    repeated_steps: int
    """That gave the bits of another round."""


class RoundsResult(Conclusion, frozen=True, kw_only=True, tag_field="kind", tag="rounds"):
    """report.json of a run of several rounds, without its schema number."""

    culprits: list[str]
    rounds: list[Round]
    workers: list[WorkerRounds]
    differences: list[Difference]
    """Between rounds."""
    compared_steps: int
    """At which every worker had the bits of all its equals, or of another round."""
    max_rate: float | None
    """With a confidence of 95 %, a smaller share of steps has an error; None: too few steps to
    tell, or one was found."""
    run: dict[str, Any]
    """What was asked for, as in the report of a round."""


def together(
    results: Mapping[str, RunResult], bits: Mapping[str, Mapping[str, Bits]], directory: str
) -> RoundsResult:
    """`results`: round -> its result, in their order, one at least. `bits`: worker -> round -> what
    it told there, of the rounds that it passed. `directory`: where the rounds lie."""
    rounds = [
        Round(
            verdict=result.verdict,
            exit_code=result.exit_code,
            summary=result.summary,
            name=name,
            culprits=result.culprits,
        )
        for name, result in results.items()
    ]
    differences = [found for name, told in bits.items() if (found := _difference(name, told))]
    repeated = {name: _num_repeated(told) for name, told in bits.items()}
    workers = [_worker(name, results, repeated) for name in _names(results)]
    first = next(iter(results.values()))
    verdict, exit_code, culprits = _verdict(rounds, differences, first.run.get("groups", {}))
    steps = sum(r.scope.compared_steps for r in results.values() if r.scope is not None)
    steps = max(steps, min(repeated.values(), default=0))
    return RoundsResult(
        verdict=verdict,
        exit_code=exit_code,
        summary=_summary(rounds, workers, differences),
        do_now=about_rounds([*results.values()], verdict, culprits, directory),
        culprits=culprits,
        rounds=rounds,
        workers=workers,
        differences=differences,
        compared_steps=steps,
        max_rate=max_rate(steps) if exit_code == EXIT_PASS else None,
        run=first.run,
    )


def _names(results: Mapping[str, RunResult]) -> list[str]:
    return list(dict.fromkeys(w.name for result in results.values() for w in result.workers))


def _worker(
    name: str, results: Mapping[str, RunResult], repeated: Mapping[str, int]
) -> WorkerRounds:
    rows = {each: row for each, result in results.items() if (row := _row_of(name, result))}
    failed = [each for each, row in rows.items() if row.verdict in _FAILED]
    num = len(failed) + sum(row.verdict in _PASSED for row in rows.values())
    return WorkerRounds(
        name=name,
        gpu=next((row.gpu for row in rows.values()), None),
        rounds=num,
        failed=failed,
        rate=len(failed) / num if num else None,
        max_rate=None if failed else max_rate(num),
        repeated_steps=repeated.get(name, 0),
    )


def _row_of(name: str, result: RunResult) -> WorkerResult | None:
    return next((worker for worker in result.workers if worker.name == name), None)


def _difference(worker: str, told: Mapping[str, Bits]) -> Difference | None:
    """None: all its rounds gave the same bits, as far as each went."""
    classes = _classes(told)
    if len(classes) < 2:
        return None
    odd = minority({name: number for number, each in enumerate(classes) for name in each})
    others = next(each for each in classes if odd.isdisjoint(each))
    rounds = [name for each in classes if each is not others for name in each]
    step = min(_first_that_differs(told[others[0]], told[name]) for name in rounds)
    return Difference(worker, rounds, step, is_minority=bool(odd))


def _classes(told: Mapping[str, Bits]) -> list[list[str]]:
    """Rounds with the same bits."""
    classes: list[list[str]] = []
    for name, bits in told.items():
        same = (each for each in classes if not list(_differing(told[each[0]], bits)))
        if (found := next(same, None)) is not None:
            found.append(name)
        else:
            classes.append([name])
    return classes


def _differing(one: Bits, other: Bits) -> Iterator[int]:
    return (step for step in one if step in other and one[step] != other[step])


def _first_that_differs(one: Bits, other: Bits) -> int:
    return min(_differing(one, other))


def _num_repeated(told: Mapping[str, Bits]) -> int:
    """Steps of further rounds that are those of the first of their bits."""
    return sum(
        len(told[each[0]].keys() & told[n].keys()) for each in _classes(told) for n in each[1:]
    )


def _verdict(
    rounds: Sequence[Round], differences: Sequence[Difference], groups: Mapping[str, str]
) -> tuple[Verdict, int, list[str]]:
    """Of the first round that did not pass; where all passed, of what differs between them."""
    culprits = list(dict.fromkeys(name for each in rounds for name in each.culprits))
    if (failed := next((each for each in rounds if each.exit_code), None)) is not None:
        return failed.verdict, failed.exit_code, culprits
    if any(_has_equals(found.worker, groups) for found in differences):
        return Verdict.INVALID, EXIT_USAGE, []
    if odd := [found.worker for found in differences if found.is_minority]:
        return Verdict.SUSPECT, EXIT_DISAGREEMENT, odd
    if differences:
        return Verdict.INCONCLUSIVE, EXIT_UNNAMED, []
    return max((each.verdict for each in rounds), key=_PASSED.index), EXIT_PASS, []


def _has_equals(worker: str, groups: Mapping[str, str]) -> bool:
    """They gave these bits, too, or the round had not passed."""
    return list(groups.values()).count(groups.get(worker, "")) > 1


def _summary(
    rounds: Sequence[Round], workers: Sequence[WorkerRounds], differences: Sequence[Difference]
) -> str:
    num = f"{len(rounds)} round{'s' * (len(rounds) != 1)}"
    parts = [
        f"{w.name} failed in {len(w.failed)} of {w.rounds} rounds" for w in workers if w.failed
    ]
    if failed := next((each for each in rounds if each.exit_code), None):
        parts.append(f"{failed.name}: {failed.summary}")
    parts += [_of_difference(found, num) for found in differences]
    same = ", each with the same bits" if any(w.repeated_steps for w in workers) else ""
    return "; ".join(parts) or f"{num} passed{same}: {rounds[-1].summary}"


def _of_difference(found: Difference, num: str) -> str:
    which = few(found.rounds)
    most = "most" if found.is_minority else "the first"
    return (
        f"{found.worker}: of {num}, {which} gave other bits than {most}, from step {found.step} on"
    )
