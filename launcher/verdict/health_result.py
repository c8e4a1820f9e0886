"""A verdict and what telemetry said of the GPUs -> the verdict with both. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from launcher.verdict.health import Record, warnings
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from model_check.errors import EXIT_HEALTH, EXIT_PASS

_NOTHING = "nothing was heard of it: its health is not known"


def with_health(result: RunResult, records: Mapping[str, Record], fails: bool) -> RunResult:
    """The result with each worker's telemetry and warnings. `records`: of the workers that were to
    be watched. `fails`: a warning about a GPU fails a run that would have passed, exit code 22."""
    workers = [_with_health(worker, records.get(worker.name), fails) for worker in result.workers]
    result = msgspec.structs.replace(result, workers=workers)
    unwell = [worker for worker in workers if worker.warnings]
    if not unwell or result.exit_code != EXIT_PASS:
        return result
    return _failed(result, unwell) if fails else _warned(result, unwell)


def _with_health(worker: WorkerResult, record: Record | None, fails: bool) -> WorkerResult:
    if record is None:
        return worker
    health = record.health()
    if health is None:
        told = [f"{worker.name}: {_NOTHING}"] if fails else []
        return msgspec.structs.replace(worker, warnings=told)
    return msgspec.structs.replace(worker, telemetry=health, warnings=warnings(worker.name, health))


def _warned(result: RunResult, unwell: Sequence[WorkerResult]) -> RunResult:
    count = sum(len(worker.warnings) for worker in unwell)
    whom = ", ".join(worker.name for worker in unwell)
    text = f"{count} warning{'' if count == 1 else 's'} about {whom}"
    return msgspec.structs.replace(result, summary=f"{result.summary}; {text}")


def _failed(result: RunResult, unwell: Sequence[WorkerResult]) -> RunResult:
    others = f" (and {len(unwell) - 1} more)" if len(unwell) > 1 else ""
    workers = [
        msgspec.structs.replace(worker, verdict=Verdict.FAIL, cause=worker.warnings[0])
        if worker.warnings
        else worker
        for worker in result.workers
    ]
    return msgspec.structs.replace(
        result,
        verdict=Verdict.FAIL,
        exit_code=EXIT_HEALTH,
        summary=f"{unwell[0].warnings[0]}{others}; launch.fail_on_health makes this a failure",
        culprits=[worker.name for worker in unwell],
        workers=workers,
    )
