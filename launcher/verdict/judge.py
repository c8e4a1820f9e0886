"""Outcomes, histories and agreement -> a verdict for each worker and for the run. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from launcher.verdict.agreement import Disagreement
from launcher.verdict.history import History
from model_check.errors import EXIT_HANG, EXIT_INTERNAL, EXIT_PASS, describe_exit
from model_check.events import Scalar


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    SUSPECT = "SUSPECT"
    """Differs from the majority of its equals."""
    INCONCLUSIVE = "INCONCLUSIVE"
    STOPPED = "STOPPED"
    """Ended by the supervisor: nothing is known against it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker's process ended: the part of the supervisor's record that a report needs."""

    name: str
    pid: int | None
    returncode: int | None
    """As `subprocess.Popen` has it (signal N is -N); None: it never ran, or could not be reaped."""
    stopped_by_us: bool
    duration_s: float
    spawn_error: str | None = None
    last_lines: list[str] = []


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the whole run ended."""

    exit_code: int
    reason: str | None = None
    """Why it was stopped; None: every worker ended by itself with exit code 0."""
    culprits: list[str] = []
    disagreement: Disagreement | None = None
    leftovers: list[int] = []
    """Processes that could not be killed."""
    dropped_lines: int = 0
    """Lines that a slow terminal missed; the log files have them."""


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table, one entry of report.json."""

    name: str
    verdict: Verdict
    cause: str | None
    steps: int
    loss_first: float | str | None
    loss_last: float | str | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    duration_s: float
    returncode: int | None
    gpu: dict[str, Any] | None = None
    detail: dict[str, Scalar] = {}
    notes: list[str] = []
    evidence: list[str] = []
    last_lines: list[str] = []


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """report.json without its schema number."""

    verdict: Verdict
    exit_code: int
    summary: str
    culprits: list[str]
    disagreement: str | None
    workers: list[WorkerResult]
    leftovers: list[int]
    dropped_lines: int
    run: dict[str, Any]
    """run.json: command, host, versions, data."""


def judge(
    run: dict[str, Any],
    end: RunEnd,
    workers: Sequence[Ended],
    histories: Mapping[str, History],
    agreed_steps: int,
) -> RunResult:
    """The verdict of a run whose facts are in `run` (what run.json holds).

    A trainer that ends well without having trained every step proves nothing: INCONCLUSIVE, and
    exit code 70, since that is a fault of ours.
    `agreed_steps`: steps at which all workers of every group of at least two had equal bits.
    """
    results = [_judge_worker(run, end, worker, histories[worker.name]) for worker in workers]
    verdict = _run_verdict(end, results)
    unproven = verdict is not Verdict.PASS and end.exit_code == EXIT_PASS
    return RunResult(
        verdict=verdict,
        exit_code=EXIT_INTERNAL if unproven else end.exit_code,
        summary=_summary(verdict, end, results, histories, agreed_steps),
        culprits=end.culprits,
        disagreement=str(end.disagreement) if end.disagreement else None,
        workers=results,
        leftovers=end.leftovers,
        dropped_lines=end.dropped_lines,
        run=run,
    )


def _judge_worker(
    run: dict[str, Any], end: RunEnd, worker: Ended, history: History
) -> WorkerResult:
    verdict, cause = _worker_verdict(end, worker, history, run.get("steps"))
    done = history.done
    return WorkerResult(
        name=worker.name,
        verdict=verdict,
        cause=cause,
        steps=history.num_steps,
        loss_first=_number(history.loss_first),
        loss_last=_number(history.loss_last),
        tokens_per_s=done.tokens_per_s if done else None,
        peak_memory_bytes=done.peak_memory_bytes if done else None,
        duration_s=round(worker.duration_s, 3),
        returncode=worker.returncode,
        gpu=run.get("gpus", {}).get(worker.name),
        detail=history.detail,
        notes=history.notes,
        evidence=[item.path for item in history.evidence],
        last_lines=worker.last_lines if verdict is Verdict.FAIL else [],
    )


def _worker_verdict(
    end: RunEnd, worker: Ended, history: History, wanted_steps: int | None
) -> tuple[Verdict, str | None]:
    if end.disagreement and worker.name in end.disagreement.bits:
        return _by_disagreement(end.disagreement, worker.name)
    if worker.spawn_error:
        return Verdict.FAIL, f"could not be started: {worker.spawn_error}"
    if worker.name in end.culprits and end.exit_code == EXIT_HANG:
        return Verdict.FAIL, end.reason
    if worker.returncode is None:
        return Verdict.INCONCLUSIVE, "its end was not seen"
    if worker.returncode != 0 and not worker.stopped_by_us:
        return Verdict.FAIL, _cause(worker.returncode, history)
    if worker.stopped_by_us:
        return Verdict.STOPPED, "stopped by us"
    if wanted_steps is not None and history.num_steps != wanted_steps:
        done = f"{history.num_steps} of {wanted_steps} steps"
        return Verdict.INCONCLUSIVE, f"ended with exit code 0 after {done}"
    return Verdict.PASS, None


def _by_disagreement(disagreement: Disagreement, name: str) -> tuple[Verdict, str]:
    place = f"step {disagreement.step}, {disagreement.quantity.replace('_', ' ')}"
    if not disagreement.odd:
        return Verdict.INCONCLUSIVE, f"differs from its peer at {place}"
    if name in disagreement.odd:
        return Verdict.SUSPECT, f"differs from the majority at {place}"
    return Verdict.STOPPED, f"agrees with the majority at {place}"


def _cause(returncode: int, history: History) -> str:
    if (bad := history.nonfinite) is not None:
        names = f", first in {bad.names[0]}" if bad.names else ""
        return f"non-finite {bad.where} at step {bad.step}{names}"
    after = f" after step {history.num_steps - 1}" if history.num_steps else ""
    said = history.done.error.splitlines()[0] if history.done and history.done.error else None
    where = "" if said or history.phase is None else f" in phase {history.phase}"
    return f"{describe_exit(returncode)}{after}{where}" + (f": {said}" if said else "")


def _run_verdict(end: RunEnd, results: Sequence[WorkerResult]) -> Verdict:
    if end.disagreement:
        return Verdict.SUSPECT if end.disagreement.odd else Verdict.INCONCLUSIVE
    if end.exit_code != 0:
        return Verdict.FAIL if end.culprits else Verdict.INCONCLUSIVE
    if any(result.verdict is Verdict.INCONCLUSIVE for result in results):
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


def _summary(
    verdict: Verdict,
    end: RunEnd,
    results: Sequence[WorkerResult],
    histories: Mapping[str, History],
    agreed_steps: int,
) -> str:
    if verdict is not Verdict.PASS:
        return _why_not(end, results)
    names = _and([result.name for result in results])
    steps = min(result.steps for result in results)
    if steps == 0:
        return f"{names} ended with exit code 0"
    tokens = min(history.tokens for history in histories.values())
    ran = f"{names} trained {steps} steps, {tokens:,} tokens each"
    if len(results) == 1:
        return f"{ran}; one worker, so nothing to compare it with"
    if agreed_steps == 0:
        return f"{ran}; no two of them are alike, so nothing was compared"
    return f"{ran}; loss and gradient norm equal bit for bit in {agreed_steps} of {steps} steps"


def _why_not(end: RunEnd, results: Sequence[WorkerResult]) -> str:
    if end.disagreement:
        return str(end.disagreement)
    failed = [result for result in results if result.name in end.culprits and result.cause]
    if len(failed) == 1 and end.exit_code != EXIT_HANG:
        return f"{failed[0].name} failed first: {failed[0].cause}"
    unproven = [f"{result.name} {result.cause}" for result in results if result.cause]
    return end.reason or "; ".join(unproven)


def _and(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _number(bits: str | None) -> float | str | None:
    """JSON has no NaN: what is not finite stays text."""
    if bits is None or bits in ("nan", "inf", "-inf"):
        return bits
    return float.fromhex(bits)
