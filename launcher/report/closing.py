"""The lines that end a run: table, verdict, and last of all the culprit's own words. Pure."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.report.table import number, table
from launcher.verdict.results import RunResult, Verdict, WorkerResult


def closing_lines(result: RunResult, directory: Path, tail_lines: int) -> Iterator[str]:
    """What follows the workers, unprefixed; `tail_lines` of each failed worker come last."""
    if len(result.workers) > 1 or any(worker.steps for worker in result.workers):
        yield from table(result.workers)
    for worker in result.workers:
        yield from _about(worker, result)
    yield from _validation(result.workers)
    yield from _warnings(result.workers)
    if result.dropped_lines:
        yield f"{result.dropped_lines} lines were too fast for this terminal; the logs have them"
    yield f"logs and report: {directory}"
    yield f"{result.verdict}: {result.summary} (exit code {result.exit_code})"
    for worker in sorted(result.workers, key=lambda worker: worker.name in result.culprits):
        tail = worker.last_lines[-tail_lines:] if tail_lines else []
        told = len(tail) == 1 and tail[0].removeprefix("error: ") in result.summary
        if tail and not told:
            yield f"last lines of {worker.name}:"
            yield from (f"  | {line}" for line in tail)


def _validation(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """Workers with the same bits share a line."""
    sharing: dict[str, list[str]] = {}
    for worker in workers:
        parts = [
            f"{split.split} {number(split.loss)}"
            + ("" if split.perplexity is None else f" (perplexity {split.perplexity:.2f})")
            for split in worker.validation
        ]
        if parts:
            text = f"validation after {worker.validation[-1].step} steps: {', '.join(parts)}"
            sharing.setdefault(text, []).append(worker.name)
    yield from (f"{', '.join(names)}: {text}" for text, names in sharing.items())


def _warnings(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """What is wrong with the GPUs; what is wrong with several of them alike, in one line."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        for warning in worker.warnings:
            names.setdefault(warning.removeprefix(f"{worker.name}: "), []).append(worker.name)
    for text, whose in names.items():
        yield f"warning: {', '.join(whose)}: {text}"


def _about(worker: WorkerResult, result: RunResult) -> Iterator[str]:
    told_below = (
        worker.verdict in (Verdict.PASS, Verdict.STOPPED) or (worker.cause or "") in result.summary
    )
    if worker.cause and not told_below:
        yield f"{worker.name}: {worker.cause}"
    for path in worker.evidence:
        yield f"{worker.name}: evidence: {path}"
