"""The lines that end a run: table, verdict, and last of all the culprit's own words. Pure."""

from collections.abc import Iterator
from pathlib import Path

from launcher.verdict.report import table
from launcher.verdict.results import RunResult, Verdict, WorkerResult


def closing_lines(result: RunResult, directory: Path, tail_lines: int) -> Iterator[str]:
    """What follows the workers, unprefixed; `tail_lines` of each failed worker come last."""
    if len(result.workers) > 1 or any(worker.steps for worker in result.workers):
        yield from table(result)
    for worker in result.workers:
        yield from _about(worker, result)
    if result.dropped_lines:
        yield f"{result.dropped_lines} lines were too fast for this terminal; the logs have them"
    yield f"logs and report: {directory}"
    yield f"{result.verdict}: {result.summary} (exit code {result.exit_code})"
    for worker in sorted(result.workers, key=lambda worker: worker.name in result.culprits):
        tail = worker.last_lines[-tail_lines:] if tail_lines else []
        told = len(tail) == 1 and tail[0].removeprefix("error: ") in result.summary
        if worker.verdict is Verdict.FAIL and tail and not told:
            yield f"last lines of {worker.name}:"
            yield from (f"  | {line}" for line in tail)


def _about(worker: WorkerResult, result: RunResult) -> Iterator[str]:
    told_below = (
        worker.verdict in (Verdict.PASS, Verdict.STOPPED) or (worker.cause or "") in result.summary
    )
    if worker.cause and not told_below:
        yield f"{worker.name}: {worker.cause}"
    for path in worker.evidence:
        yield f"{worker.name}: evidence: {path}"
