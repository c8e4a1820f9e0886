"""A run that is over -> a verdict for each worker and for the run. Pure."""

from signal import Signals

from launcher.verdict.agreement import Disagreement
from launcher.verdict.results import Case, RunResult, SplitResult, Verdict, WorkerEnd, WorkerResult
from launcher.verdict.steps import History
from launcher.verdict.summary import shared_nonfinite, summary
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    describe_exit,
)
from model_check.utils.requests import request_of


def judge(case: Case) -> RunResult:
    """The whole verdict.

    What proves nothing is never a PASS: a trainer that ends well without all its steps, or a
    process that could not be killed, is INCONCLUSIVE and exit code 70; one that was asked to end
    early, or had nothing left to do, is INCONCLUSIVE and exit code 0. A failure that every worker
    shares bit for bit blames no GPU, nor does a tie. A worker that ended by a signal which we got,
    too, was stopped.
    """
    results = [_judge_worker(case, worker) for worker in case.workers]
    verdict = _run_verdict(case, results)
    end = case.end
    return RunResult(
        verdict=verdict,
        exit_code=_exit_code(case, verdict, results),
        summary=summary(case, verdict, results),
        culprits=[] if shared_nonfinite(case) else end.culprits,
        disagreement=str(end.disagreement) if end.disagreement else None,
        workers=results,
        leftovers=end.leftovers,
        dropped_lines=end.dropped_lines,
        run=case.run,
    )


def _judge_worker(case: Case, worker: WorkerEnd) -> WorkerResult:
    history = case.histories[worker.name]
    verdict, cause = _worker_verdict(case, worker, history)
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
        gpu=case.run.get("gpus", {}).get(worker.name),
        detail=history.detail,
        validation=_validation(history),
        notes=history.notes,
        evidence=[*(item.path for item in history.evidence), *worker.evidence],
        last_lines=list(worker.last_lines) if _has_failed(case, worker, verdict) else [],
    )


def _worker_verdict(case: Case, worker: WorkerEnd, history: History) -> tuple[Verdict, str | None]:
    request = _followed(case, worker, history)
    own_failure = None if request else _own_failure(case, worker, history)
    if own_failure is not None:
        is_unordered = worker.name in case.end.tied or _is_beside_a_request(case, worker, history)
        return Verdict.INCONCLUSIVE if is_unordered else Verdict.FAIL, own_failure
    difference = case.end.disagreement
    if difference and worker.name in difference.bits and worker.name in difference.odd:
        return Verdict.SUSPECT, f"differs from the majority at {_place(difference)}"
    if difference and worker.name in difference.bits and not difference.odd:
        return Verdict.INCONCLUSIVE, f"differs from its peer at {_place(difference)}"
    if worker.pid is None:
        return Verdict.STOPPED, "never started"
    if worker.returncode is None:
        return Verdict.INCONCLUSIVE, "its end was not seen"
    wanted = _wanted_steps(case, history)
    done_well = history.done is not None and history.done.exit_code == EXIT_PASS
    if (worker.stopped_by_us or request) and not (done_well and history.num_steps == wanted):
        return Verdict.STOPPED, f"ended by {request.name}" if request else "stopped by us"
    if history.done is not None and history.done.early is not None:
        return Verdict.STOPPED, history.done.early
    if wanted is not None and history.num_steps != wanted:
        steps = f"{history.num_steps} of {wanted} steps"
        return Verdict.INCONCLUSIVE, f"ended with exit code 0 after {steps}"
    return Verdict.PASS, None


def _followed(case: Case, worker: WorkerEnd, history: History) -> Signals | None:
    """The request that ended this worker and that we got, too. None: another one, or a failure."""
    is_blamed = worker.name in (*case.end.culprits, *case.end.tied)
    if is_blamed or worker.stopped_by_us or history.nonfinite:
        return None
    request = request_of(_said(history) or worker.returncode or EXIT_PASS)
    return request if request in case.end.requests else None


def _is_beside_a_request(case: Case, worker: WorkerEnd, history: History) -> bool:
    """We were asked to end before its death was judged: it may have been asked, too, and have ended
    in its own way. What it said of a failure stays one."""
    has_said = history.nonfinite or _said(history) or worker.spawn_error
    return case.end.is_by_signal and not has_said


def _said(history: History) -> int:
    """The exit code that it announced; 0 if it announced none."""
    return history.done.exit_code if history.done else EXIT_PASS


def _has_failed(case: Case, worker: WorkerEnd, verdict: Verdict) -> bool:
    return verdict is Verdict.FAIL or worker.name in case.end.tied


def _wanted_steps(case: Case, history: History) -> int | None:
    """Steps that this worker had to train itself; None: nobody said."""
    steps = case.run.get("steps")
    return None if steps is None else max(0, steps - history.first_step)


def _own_failure(case: Case, worker: WorkerEnd, history: History) -> str | None:
    """What this worker did wrong by itself, whoever stopped it afterwards; None: nothing."""
    if worker.spawn_error:
        return f"could not be started: {worker.spawn_error}"
    if worker.name in case.end.culprits and case.end.is_hang:
        return case.end.reason
    if (bad := history.nonfinite) is not None:
        names = f", first in {bad.names[0]}" if bad.names else ""
        return f"non-finite {bad.where} at step {bad.step}{names}"
    if worker.returncode and not worker.stopped_by_us:
        oom = f"; {worker.oom}" if worker.oom else ""
        return _describe_death(worker.returncode, history, _last_error(worker)) + oom
    said = _said(history)
    acted_on = worker.name in case.end.culprits and said == case.end.exit_code
    if said != EXIT_PASS and (acted_on or said < EXIT_SIGNAL_BASE):  # before our signal reached it
        return _describe_death(said, history)
    return None


def _describe_death(returncode: int, history: History, last_error: str | None = None) -> str:
    after = "" if history.last_step is None else f" after step {history.last_step}"
    said = history.done.error.splitlines()[0] if history.done and history.done.error else last_error
    where = "" if said or history.phase is None else f" in phase {history.phase}"
    return f"{describe_exit(returncode)}{after}{where}" + (f": {said}" if said else "")


def _last_error(worker: WorkerEnd) -> str | None:
    """What a process without events said last, if that is why it ended."""
    last = worker.last_lines[-1] if worker.last_lines else ""
    return last.removeprefix("error: ") if last.startswith("error: ") else None


def _place(difference: Disagreement) -> str:
    return f"step {difference.step}, {difference.quantity.replace('_', ' ')}"


def _run_verdict(case: Case, results: list[WorkerResult]) -> Verdict:
    end = case.end
    if end.tied:
        return Verdict.INCONCLUSIVE
    if end.exit_code not in (EXIT_PASS, EXIT_DISAGREEMENT):
        return Verdict.FAIL if end.culprits else Verdict.INCONCLUSIVE
    if end.disagreement:
        return Verdict.SUSPECT if end.disagreement.odd else Verdict.INCONCLUSIVE
    failed = any(result.verdict is Verdict.FAIL for result in results)
    if failed or end.exit_code != EXIT_PASS:  # it said so, or a foreign command's own 21
        return Verdict.FAIL
    unproven = any(result.verdict is not Verdict.PASS for result in results)
    return Verdict.INCONCLUSIVE if unproven or end.leftovers else Verdict.PASS


def _exit_code(case: Case, verdict: Verdict, results: list[WorkerResult]) -> int:
    if verdict is Verdict.PASS or case.end.exit_code != EXIT_PASS:
        return case.end.exit_code
    if case.end.disagreement:
        return EXIT_DISAGREEMENT
    as_asked = all(result.verdict in (Verdict.PASS, Verdict.STOPPED) for result in results)
    if results and as_asked and not case.end.leftovers:
        return EXIT_PASS
    said = [history.done.exit_code for history in case.histories.values() if history.done]
    return next((code for code in said if code != EXIT_PASS), EXIT_INTERNAL)


def _validation(history: History) -> list[SplitResult]:
    return [
        SplitResult(
            split=event.split,
            step=event.step,
            loss=_number(event.loss),
            perplexity=event.perplexity,
            tokens_per_s=event.tokens_per_s,
        )
        for event in history.evaluations.values()
    ]


def _number(bits: str | None) -> float | str | None:
    """JSON has no NaN: what is not finite stays text."""
    if bits is None or bits in ("nan", "inf", "-inf"):
        return bits
    return float.fromhex(bits)
