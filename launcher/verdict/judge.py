"""A run that is over -> a verdict for each worker and for the run. Pure."""

from collections.abc import Sequence
from signal import Signals
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from launcher.verdict.causes import Cause
from launcher.verdict.disagreement import Disagreement, Replay, quantity_name
from launcher.verdict.record import FAULT_OF_HOST, NO_HOST_MEMORY, Case, WorkerEnd
from launcher.verdict.results import Judgement, RunResult, SplitResult, Verdict, WorkerResult
from launcher.verdict.scope import what_one_showed
from launcher.verdict.severity import Repeat
from launcher.verdict.shared import Peers, is_equal, peers_at, shared_failure
from launcher.verdict.steps import History
from launcher.verdict.summary import born, summary
from launcher.verdict.trials import what_its_trial_showed
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
    EXIT_USAGE,
    describe_exit,
)
from model_check.utils.requests import request_of

ENOUGH_STEPS = 10
"""Compared steps with which a worker passes that its deadline ended."""
_ERROR = "error: "
"""How our programs begin the line that says why they end."""
_INNOCENT = (Verdict.PASS, Verdict.STOPPED)
_BESIDE = {
    Peers.FINITE: Cause.NON_FINITE,
    Peers.FEWER_FINITE: Cause.NON_FINITE_IN_MOST,
    Peers.NOT_FINITE: Cause.NON_FINITE_EVERYWHERE,
    Peers.UNKNOWN: Cause.NON_FINITE_UNSETTLED,
}
_ALONE = {
    True: Cause.NON_FINITE_EVERYWHERE,
    False: Cause.NON_FINITE_ONCE,
    None: Cause.NON_FINITE_UNSETTLED,
}
"""By whether it came again when the step was computed again; None: not tried."""
_ODD = {
    Repeat.NOT_REPLAYED: Cause.ODD,
    Repeat.TRANSIENT: Cause.ODD_ONCE,
    Repeat.UNSETTLED: Cause.ODD_UNSETTLED,
    Repeat.INTERMITTENT: Cause.ODD_AGAIN,
    Repeat.PERSISTENT: Cause.ODD_AGAIN,
}
_BROKEN = {
    Repeat.NOT_REPLAYED: Cause.BROKEN,
    Repeat.TRANSIENT: Cause.BROKEN_ONCE,
    Repeat.UNSETTLED: Cause.BROKEN_UNSETTLED,
    Repeat.INTERMITTENT: Cause.BROKEN_AGAIN,
    Repeat.PERSISTENT: Cause.BROKEN_AGAIN,
}
_FAILED_TRIAL = {
    Repeat.NOT_REPLAYED: Cause.FAILED_TRIAL,
    Repeat.TRANSIENT: Cause.FAILED_TRIAL_ONCE,
    Repeat.UNSETTLED: Cause.FAILED_TRIAL_UNSETTLED,
    Repeat.INTERMITTENT: Cause.FAILED_TRIAL_AGAIN,
    Repeat.PERSISTENT: Cause.FAILED_TRIAL_AGAIN,
}
"""By whether it came again in its replays."""
_REPEATS = {True: Repeat.PERSISTENT, False: Repeat.TRANSIENT, None: Repeat.NOT_REPLAYED}
_OF_BITS = (EXIT_PASS, EXIT_DISAGREEMENT, EXIT_UNNAMED)
"""How a run ends whose workers differ, or one of which is no more what it was."""
_OF_NO_GPU = (
    *(Cause.NON_FINITE_EVERYWHERE, Cause.FAILED_ALIKE, Cause.REFUSED_ALIKE),
    *(Cause.VARIES, Cause.UNREPEATABLE, Cause.DIFFERS, Cause.TRIALS_DIFFER),
    *(Cause.STRAYED, Cause.BROKEN_ALIKE, Cause.BROKEN_BESIDE, Cause.NOT_REPEATED),
)
Found = tuple[Cause, dict[str, Any]]
"""A cause, and the values that its sentence needs."""


def judge(case: Case) -> Judgement:
    """The whole verdict.

    What proves nothing is never a PASS: a trainer that ends well without all its steps, or a
    process that could not be killed, is INCONCLUSIVE and exit code 70; one that was asked to end
    early, or had nothing left to do, is INCONCLUSIVE and exit code 0. A failure that every worker
    shares, or every one of a kind, blames no GPU, nor does a tie. A worker that ended by a signal
    which we got, too, was stopped.
    """
    causes = causes_of(case)
    rows = [_row(case, *each) for each in zip(case.workers, causes, strict=True)]
    verdict = _run_verdict(case, rows)
    text, explained = summary(case, verdict, rows)
    end = case.end
    result = RunResult(
        verdict=verdict,
        exit_code=_exit_code(case, verdict, rows, [cause for cause, _ in causes]),
        summary=text,
        culprits=_culprits(case, [cause for cause, _ in causes]),
        disagreement=end.disagreement,
        further=list(end.further),
        replays=list(end.replays),
        workers=rows,
        leftovers=list(end.leftovers),
        dropped_lines=end.dropped_lines,
        run=case.record.asked,
        golden=case.record.golden,
        elsewhere=end.elsewhere,
    )
    quoted = {
        worker.name
        for worker, (_, facts) in zip(case.workers, causes, strict=True)
        if worker.name in explained and facts.get("said") == f": {_last_error(worker)}"
    }
    unexplained = {row.name for row in rows if row.verdict not in _INNOCENT}
    return Judgement(result, unexplained.difference(explained), quoted, case.is_training)


def _shown_beside(case: Case, history: History) -> list[str]:
    """What a training shows of its device: the summary of a check tells it."""
    shows = case.is_training and case.end.exit_code == EXIT_PASS
    return [what_one_showed(history, None)] if shows else []


def causes_of(case: Case) -> list[Found]:
    """Why each worker ended as it did, in their order."""
    return [_answered(case, worker, _cause(case, worker)) for worker in case.workers]


def _culprits(case: Case, causes: Sequence[Cause]) -> list[str]:
    """All that are named, whoever ended the run first: its exit code is that one's."""
    workers = zip(case.workers, causes, strict=True)
    cleared = {worker.name for worker, cause in workers if cause in _OF_NO_GPU}
    named = dict.fromkeys([*case.end.culprits, *case.suspects])
    return [name for name in named if name not in cleared]


def _row(case: Case, worker: WorkerEnd, found: Found) -> WorkerResult:
    history = case.histories[worker.name]
    cause, facts = found
    verdict, sentence, cause_class, severity = (*cause.value, None, None)[:4]
    if verdict is Verdict.FAIL and _is_unordered(case, worker, history):
        verdict = Verdict.INCONCLUSIVE
    is_by_bits = cause in (*_ODD.values(), *_BROKEN.values(), *_FAILED_TRIAL.values())
    ended_by_itself = verdict is Verdict.FAIL or cause is Cause.NO_HOST_MEMORY
    ended_by_itself |= cause is Cause.FAILED_ALIKE and history.done is None
    tells_last_lines = (ended_by_itself and not is_by_bits) or worker.name in case.end.tied
    done = history.done
    return WorkerResult(
        name=worker.name,
        verdict=verdict,
        cause=sentence.format(**facts) or None,
        steps=history.num_steps,
        loss_first=_number(history.loss_first),
        loss_last=_number(history.loss_last),
        tokens_per_s=done.tokens_per_s if done else None,
        peak_memory_bytes=done.peak_memory_bytes if done else None,
        duration_s=round(worker.duration_s, 3),
        waiting=None if history.waiting is None else round(history.waiting, 4),
        returncode=worker.returncode,
        gpu=case.record.gpus.get(worker.name),
        detail=history.detail,
        validation=_validation(history),
        notes=[*history.notes, *_shown_beside(case, history)],
        evidence=[*(item.path for item in history.evidence), *worker.evidence],
        last_lines=list(worker.last_lines) if tells_last_lines else [],
        cause_class=cause_class,
        severity=severity,
        repeat=facts.get("repeat"),
        trace=history.tracer.trace,
    )


def _cause(case: Case, worker: WorkerEnd) -> Found:
    history, difference = case.histories[worker.name], _difference_of(case, worker)
    request = _request(case, worker, history)
    if (said := _variation(case, worker.name)) and (history.broken or difference):
        return Cause.VARIES, {"said": said}
    if (
        difference
        and case.end.exit_code in _OF_BITS
        and (by := _by_trial(case, worker, difference))
    ):
        return by
    odd = _odd(case, worker, difference)
    if odd and history.broken is None and case.end.exit_code in _OF_BITS:
        return odd
    if request is None and (failure := _failure(case, worker, history)) is not None:
        return failure
    if odd is not None:
        return odd
    if difference and difference.dispute and worker.name in difference.disputed:
        place = f"step {difference.step}, {quantity_name(difference.dispute.quantity)}"
        return Cause.DIFFERS, _facts(case, worker, difference) | {"place": place}
    if said := next((r.said for r in case.end.replays if r.doubted == worker.name), None):
        return Cause.STRAYED, {"said": said}
    if difference and _is_apart(case, worker, difference):
        return Cause.DIFFERS, _facts(case, worker, difference)
    if worker.pid is None:
        return Cause.NEVER_STARTED, {}
    if worker.returncode is None:
        return Cause.END_UNSEEN, {}
    steps, done = case.record.steps, history.done
    # What this worker had to train itself; None: a foreign command.
    to_do = None if steps is None else max(0, steps - history.first_step)
    has_done_all = done and done.exit_code == EXIT_PASS and history.num_steps == to_do
    if request and not has_done_all:
        return Cause.REQUESTED, {"signal": request.name}
    if worker.stopped_by_us and not has_done_all and case.end.is_deadline:
        return _by_deadline(case, worker)
    if worker.stopped_by_us and not has_done_all:
        return Cause.STOPPED_ON_REQUEST if case.end.is_by_signal else Cause.STOPPED, {}
    if done and done.early is not None:
        return Cause.ENDED_EARLY, {"why": done.early}
    if to_do not in (None, history.num_steps):
        return Cause.TOO_FEW_STEPS, {"done": history.num_steps, "to_do": to_do}
    return Cause.NONE, {}


def _answered(case: Case, worker: WorkerEnd, found: Found) -> Found:
    """With what a golden file tells of a worker that passed else."""
    golden = case.record.golden
    standing = None if golden is None else golden.of(worker.name)
    if golden is None or standing is None or found[0] is not Cause.NONE:
        return found
    if not standing.is_comparable:
        return Cause.NO_GOLDEN, {"whom": golden.label, "reasons": "; ".join(standing.reasons)}
    if standing.disagreement is not None and case.is_unlike_golden:
        return Cause.UNLIKE_GOLDEN, {"whom": golden.label, "place": standing.place}
    return found


def _by_deadline(case: Case, worker: WorkerEnd) -> Found:
    """It did nothing wrong until then."""
    alone = case.histories[worker.name].num_steps
    done = case.agreed_steps.get(worker.name, alone)
    if done >= ENOUGH_STEPS:
        return Cause.NONE, {}
    return Cause.TOO_SOON, {"done": done, "enough": ENOUGH_STEPS}


def _failure(case: Case, worker: WorkerEnd, history: History) -> Found | None:
    """What this worker did wrong by itself, whatever stopped it later; None: nothing."""
    end, done, announced = case.end, history.done, _announced(history)
    error = done.error.splitlines()[0] if done and done.error else None
    is_blamed = worker.name in end.culprits
    if done and done.peer_lost and not is_blamed:
        return Cause.FOLLOWED, {"said": error}
    if worker.spawn_error and worker.returncode == EXIT_INTERNAL:
        return Cause.NO_PROCESS, {"spawn_error": worker.spawn_error, "whose": FAULT_OF_HOST}
    if worker.spawn_error:
        return Cause.NOT_STARTED, {"spawn_error": worker.spawn_error}
    if is_blamed and end.is_hang:
        return Cause.HANG, {"reason": end.reason}
    if (bad := history.nonfinite) is not None:
        peers = peers_at(case, worker.name, bad.step)
        cause = _ALONE[bad.repeated] if peers is Peers.NONE else _BESIDE[peers]
        facts = {"where": bad.where, "step": bad.step, "born": born(bad)}
        return cause, facts | {"repeat": _REPEATS[bad.repeated]}
    if history.broken is not None:
        facts = {"what": history.broken.what} | _repeat_facts(case, worker)
        if case.changed_alike:
            return Cause.BROKEN_ALIKE, facts
        is_named = worker.name in case.suspects
        return _BROKEN[_repeat_of(case, worker)] if is_named else Cause.BROKEN_BESIDE, facts
    if history.repeated is False and _kernels_vary(case, worker):
        return Cause.UNREPEATABLE, {}
    if history.repeated is False and worker.name not in case.suspects:
        return Cause.NOT_REPEATED, {}
    if end.mismatch and worker.name in end.mismatch.values:
        return Cause.NOT_COMPARABLE, {"mismatch": end.mismatch}
    if shared_failure(case, worker.name) is not None:
        cause = Cause.REFUSED_ALIKE if announced == EXIT_USAGE else Cause.FAILED_ALIKE
        said = error if done else _last_error(worker)
        return cause, _failed(worker, history, announced or worker.returncode or 0, said)[1]
    if worker.oom and announced == EXIT_PASS:
        how = f"{NO_HOST_MEMORY}{_where(history)}"
        return Cause.NO_HOST_MEMORY, {"how": how, "oom": f"; {worker.oom}", "whose": FAULT_OF_HOST}
    if worker.returncode and not worker.stopped_by_us:
        return _failed(worker, history, worker.returncode, error or _last_error(worker))
    is_stopped_for = is_blamed and announced == end.exit_code
    if announced != EXIT_PASS and (is_stopped_for or announced < EXIT_SIGNAL_BASE):
        return _failed(worker, history, announced, error)
    return None


def _odd(case: Case, worker: WorkerEnd, difference: Disagreement | None) -> Found | None:
    """None: neither its equals nor a golden file name it. `difference`: between the workers."""
    if worker.name not in case.suspects:
        return None
    golden, cause = case.record.golden, _ODD[_repeat_of(case, worker)]
    if difference is not None and worker.name in case.odd_by_replay:
        return cause, _facts(case, worker, difference) | {"whom": "its peer"}
    if difference is not None and worker.name in difference.odd:
        return cause, _facts(case, worker, difference) | {"whom": "the majority"}
    if worker.name == case.odd_among_nodes and case.end.elsewhere is not None:
        facts = {"place": f"step {case.end.elsewhere.step}", "repeat": Repeat.NOT_REPLAYED}
        return cause, facts | {"whom": "the other nodes"}
    standing = None if golden is None else golden.of(worker.name)
    if golden is None or standing is None or standing.disagreement is None:
        return None
    return cause, _facts(case, worker, standing.disagreement) | {"whom": golden.label}


def _by_trial(case: Case, worker: WorkerEnd, difference: Disagreement) -> Found | None:
    """However it ended: one that may take no other kernel ends by itself. None: no trial is known
    against it."""
    if not difference.is_of_trial:
        return None
    told = case.histories[worker.name].detail
    facts = _facts(case, worker, difference)
    facts |= {"shown": what_its_trial_showed(worker.name, difference, told)}
    if worker.name in case.suspects and worker.name in (*difference.odd, *case.odd_by_replay):
        return _FAILED_TRIAL[_repeat_of(case, worker)], facts
    return (Cause.TRIALS_DIFFER, facts) if _is_apart(case, worker, difference) else None


def _is_apart(case: Case, worker: WorkerEnd, difference: Disagreement) -> bool:
    """Whether it is one of those that differ, and of whom none is named."""
    doubted = set(difference.odd).intersection(case.doubted)
    if doubted:
        return worker.name in doubted
    return worker.name in difference.bits and not difference.bits.keys() & case.suspects


def _facts(case: Case, worker: WorkerEnd, difference: Disagreement) -> dict[str, Any]:
    place = f"step {difference.step}, {difference.place}"
    return {"place": place} | _repeat_facts(case, worker)


def _repeat_facts(case: Case, worker: WorkerEnd) -> dict[str, Any]:
    """What its replays showed, and in words: how often it was wrong, what it did of two."""
    found = _replay_of(case, worker)
    of_two = ""
    if found.odd:
        which = "other" if worker.name == found.odd else "the same"
        of_two = f"; computed again it gave {which} bits"
    right = f"right in {found.times} replay{'s' * (found.times != 1)}"
    again = {"again": f"wrong again in {found.how_often}", "right": right, "of_two": of_two}
    return {"repeat": _repeat_of(case, worker)} | again


def _kernels_vary(case: Case, worker: WorkerEnd) -> bool:
    """Whether the run ended of that, or more than this one's first step did not repeat itself, or
    it has no equal."""
    if case.end.exit_code == EXIT_USAGE and worker.name in case.end.culprits:
        return True
    equals = [n for n in case.histories if is_equal(case, worker.name, n)]
    return len(equals) == 1 or sum(case.histories[n].repeated is False for n in equals) > 1


def _difference_of(case: Case, worker: WorkerEnd) -> Disagreement | None:
    """The one that names it; else the last in which it has part."""
    found = [each for each in case.end.disagreements if worker.name in each.bits]
    named = [each for each in found if worker.name in each.odd]
    return next(iter(named), None) or next(reversed(found), None)


def _repeat_of(case: Case, worker: WorkerEnd) -> Repeat:
    return _replay_of(case, worker).repeat_of(worker.name)


def _replay_of(case: Case, worker: WorkerEnd) -> Replay:
    """Of this worker alone, else of two that differ."""
    found = [replay for replay in case.end.replays if worker.name in replay.suspects]
    return min(found, key=lambda replay: len(replay.suspects), default=Replay(to_step=0))


def _variation(case: Case, worker: str) -> str | None:
    """What a replay told that clears this worker: a healthy one of its kind varies. None: none
    did."""
    for replay in case.end.replays:
        if replay.is_software and any(is_equal(case, worker, name) for name in replay.suspects):
            return replay.said
    return None


def _failed(worker: WorkerEnd, history: History, returncode: int, error: str | None) -> Found:
    how = f"{describe_exit(returncode)}{_where(history, tells_phase=not error)}"
    said = f": {error}" if error else ""
    return Cause.FAILED, {"how": how, "said": said, "oom": f"; {worker.oom}" if worker.oom else ""}


def _where(history: History, tells_phase: bool = True) -> str:
    after = "" if history.last_step is None else f" after step {history.last_step}"
    phase = "" if history.phase is None or not tells_phase else f" in phase {history.phase}"
    return f"{after}{phase}"


def _last_error(worker: WorkerEnd) -> str | None:
    """Why it ended, by its last line; None: the line says something else."""
    last = worker.last_lines[-1] if worker.last_lines else ""
    return last.removeprefix(_ERROR) if last.startswith(_ERROR) else None


def _request(case: Case, worker: WorkerEnd, history: History) -> Signals | None:
    """The request that ended this worker and that we got, too. None: another one, or a failure."""
    is_blamed = worker.name in (*case.end.culprits, *case.end.tied)
    if is_blamed or worker.stopped_by_us or history.nonfinite:
        return None
    request = request_of(_announced(history) or worker.returncode or EXIT_PASS)
    return request if request in case.end.requests else None


def _is_unordered(case: Case, worker: WorkerEnd, history: History) -> bool:
    """Whether it is unknown if this worker failed by itself: several failed together, or we were
    asked to end before its death was judged. Then it may have been asked, too, and have ended in
    its own way. A failure that it told itself stays a failure."""
    has_said = history.nonfinite or _announced(history) or worker.spawn_error
    return worker.name in case.end.tied or (case.end.is_by_signal and not has_said)


def _announced(history: History) -> int:
    """The exit code that the worker announced; 0 if it announced none."""
    return history.done.exit_code if history.done else EXIT_PASS


def _run_verdict(case: Case, rows: list[WorkerResult]) -> Verdict:
    end = case.end
    if end.tied:
        is_alike = all(shared_failure(case, name) is not None for name in end.tied)
        return Verdict.FAIL if is_alike else Verdict.INCONCLUSIVE
    invalid = {row.name for row in rows if row.verdict is Verdict.INVALID}
    varies = any(replay.is_software for replay in end.replays) and invalid.issuperset(case.suspects)
    is_alike = case.is_unlike_golden or bool(case.changed_alike)
    if invalid and (end.exit_code == EXIT_USAGE or varies or is_alike):
        return Verdict.INVALID
    if end.exit_code not in _OF_BITS:
        if any(row.name in end.culprits and row.verdict is Verdict.SUSPECT for row in rows):
            return Verdict.SUSPECT
        is_blamed = end.culprits or (end.elsewhere is not None and end.elsewhere.worker)
        return Verdict.FAIL if is_blamed else Verdict.INCONCLUSIVE
    if end.disagreement or case.suspects or case.doubted:
        if any(row.verdict is Verdict.FAIL for row in rows if row.name in case.suspects):
            return Verdict.FAIL
        return Verdict.SUSPECT if case.suspects else Verdict.INCONCLUSIVE
    failed = any(row.verdict is Verdict.FAIL for row in rows)
    if end.elsewhere is not None and end.exit_code in (EXIT_DISAGREEMENT, EXIT_UNNAMED):
        return Verdict.SUSPECT if end.elsewhere.worker else Verdict.INCONCLUSIVE
    # A worker said so, or a foreign command ended with its own 21.
    if failed or end.exit_code != EXIT_PASS:
        return Verdict.FAIL
    unproven = any(row.verdict is not Verdict.PASS for row in rows)
    return Verdict.INCONCLUSIVE if unproven or end.leftovers else Verdict.PASS


def _exit_code(
    case: Case, verdict: Verdict, rows: list[WorkerResult], causes: Sequence[Cause]
) -> int:
    differs = case.end.disagreement is not None or bool(case.suspects or case.doubted)
    if verdict is Verdict.INVALID:
        return EXIT_USAGE
    if differs and case.end.exit_code in _OF_BITS:
        return EXIT_DISAGREEMENT if case.suspects else EXIT_UNNAMED
    if verdict is Verdict.PASS or case.end.exit_code != EXIT_PASS:
        return case.end.exit_code
    if case.end.is_deadline:
        return EXIT_UNPROVEN
    of_rows = zip(rows, causes, strict=True)
    as_asked = all(row.verdict in _INNOCENT or c is Cause.NO_GOLDEN for row, c in of_rows)
    if rows and as_asked and not case.end.leftovers:
        return EXIT_UNPROVEN if Cause.NO_GOLDEN in causes else EXIT_PASS
    said = [history.done.exit_code for history in case.histories.values() if history.done]
    return next((code for code in said if code != EXIT_PASS), EXIT_INTERNAL)


def _validation(history: History) -> list[SplitResult]:
    return [
        replace(convert(event, SplitResult, from_attributes=True), loss=_number(event.loss))
        for event in history.evaluations.values()
    ]


def _number(bits: str | None) -> float | str | None:
    """JSON has no NaN: what is not finite stays text."""
    if bits is None or bits in ("nan", "inf", "-inf"):
        return bits
    return float.fromhex(bits)
