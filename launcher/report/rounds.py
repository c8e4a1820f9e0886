"""The report of a run of several rounds, made of what each left in its directory."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from launcher import run_dir
from launcher.report.files import lines_of
from launcher.report.page.rounds import rounds_page
from launcher.verdict.results import RunResult, Verdict
from launcher.verdict.rounds import Bits, RoundsResult, WorkerRounds, together
from launcher.verdict.summary import called, names_by_text
from model_check.errors import EXIT_PASS
from model_check.events import Step, decode
from model_check.utils.fingerprint import is_compared
from model_check.utils.words import few

_MAX_TOLD = 10
"""Rounds that did not pass, on the terminal."""


class Rounds:
    """What is known of them, in their order."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._results: dict[str, RunResult] = {}
        self._bits: dict[str, dict[str, Bits]] = {}

    def take(self, directory: Path, result: RunResult) -> None:
        """One that has ended, and what it told there. Raises UsageError."""
        self._results[directory.name] = result
        passed = [w.name for w in result.workers if w.verdict in (Verdict.PASS, Verdict.WARN)]
        for worker in passed if result.run.get("not_compared") is None else ():
            bits = dict(_steps(directory / f"{worker.lower()}.events.jsonl"))
            self._bits.setdefault(worker, {})[directory.name] = bits

    @property
    def result(self) -> RoundsResult:
        """Of one at least."""
        return together(self._results, self._bits, str(self._directory))


def write_rounds(result: RoundsResult, directory: Path) -> None:
    """report.json and report.html, each whole or not at all. Raises StorageError."""
    run_dir.write(directory / "report.json", msgspec.to_builtins(result))
    run_dir.write_page(directory / "report.html", lambda: rounds_page(result))


def rounds_lines(result: RoundsResult, directory: Path) -> Iterator[str]:
    """What follows the last round, unprefixed; the verdict comes last."""
    bad = [each for each in result.rounds if each.exit_code != EXIT_PASS]
    yield from (f"{each.name}: {each.verdict}: {each.summary}" for each in bad[:_MAX_TOLD])
    if len(bad) > _MAX_TOLD:
        yield f"{len(bad) - _MAX_TOLD} more rounds did not pass"
    seen = [worker for worker in result.workers if worker.rounds]
    rates = names_by_text((worker.name, _rate(worker)) for worker in seen)
    everyone = [worker.name for worker in result.workers]
    yield from (f"{called(names, everyone)}: {text}" for text, names in rates.items())
    if result.max_rate is not None:
        share = f"errors in fewer than {result.max_rate:.2%} of steps (95 %)"
        yield f"not shown: {share}: {result.compared_steps:,} were compared"
    yield f"rounds and report: {directory}"
    yield from result.last_lines


def _rate(worker: WorkerRounds) -> str:
    """`failed in 3 of 20 rounds (15 %): round_004, round_009, round_011`"""
    of = f"failed in {len(worker.failed)} of {worker.rounds} rounds"
    if worker.failed:
        return f"{of} ({worker.rate:.0%}): {few(worker.failed)}"
    if worker.max_rate is not None:
        return f"{of}: in fewer than {worker.max_rate:.0%} of all (95 %)"
    return of


def _steps(path: Path) -> Iterator[tuple[int, int]]:
    """(step, digest of its bits). Raises UsageError."""
    for event in lines_of(path, decode):
        if isinstance(event, Step):
            fp = tuple(sorted(each for each in event.fp.items() if is_compared(each[0])))
            yield event.step, hash((event.loss, event.grad_norm, event.taken, fp))
