"""A verdict and what telemetry reported of the GPUs -> the verdict with both. Pure."""

from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType

from msgspec.structs import replace

from launcher.telemetry.health import slow_symptom, symptoms
from launcher.verdict.health import Health
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.rules import Kind
from launcher.verdict.severity import CauseClass, Symptom, worst
from launcher.verdict.slow import Slow
from launcher.verdict.summary import called, names_by_text
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
)
from model_check.events import Telemetry

_LETS_PASS = "launch.fail_on lets it pass"
Healths = Mapping[str, Health | None]
"""Of the workers whose GPUs were to be watched; None: nothing was reported of this one."""
Symptoms = Mapping[str, Sequence[Symptom]]
"""Worker -> what is wrong with its GPU, or not known of it; a worker without any is not in it."""


SlowWorkers = Mapping[str, tuple[Slow, Sequence[Telemetry]]]
"""Worker -> how slow it was, and the samples of its GPU from then."""


def with_health(
    result: RunResult,
    healths: Healths,
    fail_on: Collection[str],
    slow: SlowWorkers = MappingProxyType({}),
) -> RunResult:
    """The result with each worker's telemetry, and with who was slow.

    A hard symptom fails its GPU's row, whatever the row was; any other makes a PASS a WARN. The
    run ends with exit code 22 for a severity that `fail_on` holds, unless it failed otherwise.
    Where two workers differ, a hard symptom of one of them tells which is odd.
    """
    found = _find_symptoms(result, healths, slow)
    differing, odd = _odd_by_symptoms(result, found)
    told = [
        replace(worker, telemetry=healths.get(worker.name), slow=slow.get(worker.name, (None,))[0])
        for worker in result.workers
    ]
    workers = [_row(worker, found.get(worker.name, ())) for worker in told]
    decided = _decide(result, found, fail_on)
    if odd is not None:
        decided = _named(decided, odd)
        workers = [_cleared(row, odd) if row.name in differing - {odd} else row for row in workers]
    remarks = [decided.summary]
    # Any other end has a cause of its own, and warnings would only hide it.
    if result.exit_code == EXIT_PASS:
        remarks += _warnings(found, decided)
        remarks += _unwatched(result, healths)
    return replace(decided, summary="; ".join(remarks), workers=workers)


def _find_symptoms(result: RunResult, healths: Healths, slow: SlowWorkers) -> Symptoms:
    """A run that failed before anything was reported of its GPUs has nothing to say of them."""
    found = {
        worker.name: symptoms(worker.name, healths[worker.name])
        for worker in result.workers
        if worker.name in healths and (healths[worker.name] or _is_open(result))
    }
    for name, (how, samples) in slow.items():
        found.setdefault(name, []).append(slow_symptom(how, samples))
    return {name: of_one for name, of_one in found.items() if of_one}


def _is_open(result: RunResult) -> bool:
    """Nothing decided how the run ended. Exit code 70 without a culprit: nothing is proven, unless
    this host is the cause."""
    is_of_host = any(worker.cause_class is CauseClass.HOST for worker in result.workers)
    unproven = result.exit_code == EXIT_INTERNAL and not result.culprits and not is_of_host
    return result.exit_code == EXIT_PASS or unproven


def _row(worker: WorkerResult, found: Sequence[Symptom]) -> WorkerResult:
    hard = [symptom for symptom in found if symptom.is_hard]
    soft = [f"{worker.name}: {symptom}" for symptom in found if not symptom.is_hard]
    worker = replace(worker, warnings=soft, symptoms=list(map(str, hard)))
    if not hard and not (soft and worker.verdict is Verdict.PASS):
        return worker
    gravest = worst(found)
    has_cause = worker.verdict not in (Verdict.PASS, Verdict.STOPPED)
    cause = worker.cause if has_cause or not hard else _sentence(hard)
    worker = _as(Kind.GPU_FAULT if hard else Kind.GPU_WARNING, worker, cause)
    return replace(worker, cause_class=gravest.cause_class, severity=gravest.severity)


def _as(kind: Kind, worker: WorkerResult, cause: str | None) -> WorkerResult:
    cause_class, severity = kind.rule.classed
    return replace(
        worker,
        verdict=kind.rule.verdict,
        kind=kind.name.lower(),
        cause=cause,
        cause_class=cause_class,
        severity=severity,
    )


def _decide(result: RunResult, found: Symptoms, fail_on: Collection[str]) -> RunResult:
    """The result with the hard symptoms in its summary, and failed by those that `fail_on` holds:
    its culprits are the GPUs that have one, and they come first.

    A run that failed otherwise stays what it is: its exit code is that of its first culprit.
    """
    failing = {name: of_one for name, of_one in found.items() if _fails(of_one, fail_on)}
    hard = {name: of_one for name, of_one in found.items() if worst(of_one).is_hard}
    if failing and (_is_open(result) or result.exit_code == EXIT_UNPROVEN):
        parts = [_sentences(failing)]
        if not failing.keys() & hard.keys():
            parts.append("launch.fail_on makes this a failure")
        if result.verdict is not Verdict.PASS:
            parts.append(result.summary)
        if passing := {name: of_one for name, of_one in hard.items() if name not in failing}:
            parts.append(f"{_sentences(passing)}; {_LETS_PASS}")
        culprits = list(failing)
        code = Kind.GPU_FAULT.rule.exit_code
        failed = replace(result, verdict=Verdict.FAIL, exit_code=code, culprits=culprits)
        return replace(failed, summary="; ".join(parts))
    if not hard:
        return result
    summary = f"{result.summary}; {_sentences(hard)}"
    if result.verdict is not Verdict.PASS:
        return replace(result, summary=summary)
    return replace(result, verdict=Verdict.WARN, summary=f"{summary}; {_LETS_PASS}")


def _odd_by_symptoms(result: RunResult, found: Symptoms) -> tuple[Set[str], str | None]:
    """The workers that differ without a majority; of two, the one whose GPU has a hard symptom.
    None: both have one, or neither. Of more, the others would differ without it, too."""
    if result.exit_code != EXIT_UNNAMED or result.disagreement is None:
        return set(), None
    differing = set(result.disagreement.bits)
    condemned = [name for name in differing if name in found and worst(found[name]).is_hard]
    is_told = len(differing) == 2 and len(condemned) == 1
    return differing, condemned[0] if is_told else None


def _named(result: RunResult, odd: str) -> RunResult:
    summary = f"{result.summary}; the health of {odd} tells that it is the odd one"
    code = EXIT_DISAGREEMENT
    return replace(result, verdict=Verdict.FAIL, exit_code=code, culprits=[odd], summary=summary)


def _cleared(worker: WorkerResult, odd: str) -> WorkerResult:
    """The row of a worker that differs from `odd`: nothing is known against it."""
    return _as(Kind.CLEARED, worker, Kind.CLEARED.rule.sentence.format(odd=odd))


def _fails(found: Sequence[Symptom], fail_on: Collection[str]) -> bool:
    return any((symptom.word or symptom.severity.lower()) in fail_on for symptom in found)


def _warnings(found: Symptoms, decided: RunResult) -> list[str]:
    """How many there are, and about which GPU, or how many: a line each names them."""
    counts = {
        name: num
        for name, of_one in found.items()
        if name not in decided.culprits and (num := sum(not each.is_hard for each in of_one))
    }
    if not counts:
        return []
    num, everyone = sum(counts.values()), [worker.name for worker in decided.workers]
    whose = "all" if len(counts) == len(everyone) else f"{len(counts)} of"
    who = f"{whose} {called(everyone, everyone)}" if len(counts) > 1 else next(iter(counts))
    return [f"{num} warning{'' if num == 1 else 's'} about {who}"]


def _unwatched(result: RunResult, healths: Healths) -> list[str]:
    if all(worker.gpu is None or worker.name in healths for worker in result.workers):
        return []
    return ["nobody watched the health of the GPUs (launch.telemetry_interval_s = 0)"]


def _sentences(found: Symptoms) -> str:
    """One for each GPU; those with the same symptoms share it."""
    sharing = names_by_text((name, _sentence(of_one)) for name, of_one in found.items())
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in sharing.items())


def _sentence(found: Sequence[Symptom]) -> str:
    """Its figures (the hard ones, where there are some), and what to do about the gravest: each of
    many memory errors would ask for the same reset."""
    gravest = worst(found)
    figures = [symptom.figure for symptom in found if symptom.is_hard == gravest.is_hard]
    return str(replace(gravest, figure=", ".join(figures)))
