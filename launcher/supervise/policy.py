"""Decide whether a run goes on, and which worker is to blame when it does not. Pure: a test is a
list of views."""

import signal
from collections.abc import Collection, Sequence

from msgspec import Struct

from launcher.verdict.last_lines import last_words, without_numbers
from launcher.verdict.nodes import LostPeer
from launcher.verdict.observer import NEVER, SETTLE_S, SETTLE_STEPS, Dismissal
from launcher.verdict.record import FAULT_OF_HOST, NO_HOST_MEMORY, Stop
from model_check.config.ranks import SILENCE_PATIENCE
from model_check.errors import (
    EXIT_HANG,
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_PEER_LOST,
    EXIT_SIGNAL_BASE,
    describe_exit,
    exit_code_of,
)
from model_check.utils.evidence import EVIDENCE_BYTES_PER_S, EVIDENCE_S
from model_check.utils.requests import request_of
from model_check.utils.wire import BEAT_S
from model_check.utils.words import listed

LINGER_S = 5.0
"""A worker that announced its failure has this long to end by itself before it counts as failed."""
HOLD_S = 0.2
"""A worker that ended as a request asks may have got the request before us: `systemctl stop`,
`scancel` and `killall` signal the processes of a job one after the other. We wait this long for our
own copy before we blame the worker."""
MOMENT_S, LATE_MOMENT_S, LATE_S = 0.4, 1.0, 5.0
"""A worker ended by itself and told nothing. If all others end in the same way within the time that
it took from its start (MOMENT_S at least; LATE_MOMENT_S if it took more than LATE_S), no GPU is to
blame."""
_TOGETHER = 0.1
"""Workers that were last heard within this share of the limit of silence fell silent together."""
IDLE_S = 0.03
"""A worker that has done nothing for so long, and is older by AGE_S than the first one became, will
not end in that way."""
AGE_S = 0.05
"""By so much more as Limits.moment_s is longer on a busy machine, where it may have begun late."""
FOLLOW_S = 2.0
"""A rank that lost another one may tell so before we see what became of that one. Ranks of a job
have so long to fail as the first one: they take each step together."""
DEADLINE_STOP_S, DEADLINE_KILL_S = 2.0, 0.5
"""So long before the deadline the workers are asked to end, and are killed."""
DEADLINE_SHARE = 0.2
"""Of the whole time: no more of it goes into the end."""


class Limits(Struct, frozen=True):
    """How long we wait for a worker, in seconds."""

    grace_s: float
    """From SIGTERM to SIGKILL."""
    silence_s: float
    """Longest time without an event or a byte of output; 0: no limit."""
    evidence_s: float = EVIDENCE_S
    """Longest silence of a worker that met a NaN, beside SILENCE_PATIENCE of its steps and the time
    that its evidence takes."""
    early_s: float = 30.0
    """A worker that ended well so long before the others is told in a line."""
    until: float = NEVER
    """When all must be over, launcher and report too: monotonic seconds."""
    deadline_s: float = 0.0
    """The same as it was asked for: seconds after the start."""
    is_job: bool = False
    """The workers are ranks of one job: when one is gone, no other goes on."""
    num_distant: int = 0
    """Ranks of the job on other nodes."""
    elsewhere_s: float = 0.0
    """So long their launchers may take to tell what they know of a rank that was lost."""
    moment_s: float = MOMENT_S
    """MOMENT_S, longer on a busy machine."""

    @property
    def stop_at(self) -> float:
        """When to ask the workers to end, so that all is over in time."""
        return self.until - min(DEADLINE_STOP_S, DEADLINE_SHARE * self.deadline_s)

    def grace_left_s(self, now: float) -> float:
        """From SIGTERM to SIGKILL, where it is sent now."""
        return max(0.0, min(self.grace_s, self.until - DEADLINE_KILL_S - now))


class Confession(Struct, frozen=True):
    """A worker's own announcement that it failed, which may come well before its end."""

    at: float
    """Its own stamp, monotonic seconds: better evidence than the order in which we saw deaths."""
    exit_code: int
    heard_at: float
    """When we received it."""
    final: bool
    """It also said that it is done. A worker that only met a NaN may still be writing evidence."""
    step: int | None = None
    """In which it failed; None: before its first."""
    evidence_bytes: int = 0
    """How much evidence it is writing."""
    peer_lost: bool = False
    """It failed because another rank is gone, or does not come."""


class WorkerView(Struct, eq=False):
    """What the policy knows of one worker; `Worker` keeps it up to date. Times are monotonic
    seconds. Fields without a word here are those of `WorkerEnd`."""

    name: str
    returncode: int | None = None
    spawn_error: str | None = None
    oom: str | None = None
    started_at: float | None = None
    """None: not started yet."""
    last_heard: float = 0.0
    patient_phase: str | None = None
    """The phase it is in, when silence is normal for long there. None also for a foreign command,
    which never tells a phase."""
    step_s: float = 0.0
    """The median of how long its last steps took."""
    last_step: int | None = None
    confession: Confession | None = None
    ended_at: float = 0.0
    wake: int = 0
    """Number of the wake-up that saw it end: within one, the order of deaths is unknown. The kernel
    keeps no time of a death, and its list is no order of causes: a process that died of the closed
    socket of another one stood before it in 2 of 20 trials, in 5 of 20 if that one held 19,000 more
    descriptors."""
    last_lines: tuple[str, ...] = ()
    error: str | None = None
    """Its last message on why it failed (`Done.error`)."""
    dismissal: Dismissal | None = None
    """The run goes on without it: however it ends, it ends nothing else."""
    is_idle: bool = False
    """While another one's death is judged: it has done nothing since it was looked at before."""


class Continue(Struct, frozen=True):
    """Nothing to do until `until` (monotonic seconds; NEVER: until something happens)."""

    until: float = NEVER
    why: str = ""
    """What people should know of it."""


class Done(Struct, frozen=True):
    """All workers ended with exit code 0."""


def decide(
    workers: Sequence[WorkerView],
    now: float,
    limits: Limits,
    received: Collection[int] = (),
    lost_elsewhere: Sequence[LostPeer] = (),
) -> Continue | Stop | Done:
    """The first failure wins; silence is a failure too. `received`: the requests that we got, some
    of which do not end a run by themselves. `lost_elsewhere`: ranks of other nodes that lost one.
    """
    everybody, workers = workers, [w for w in workers if w.dismissal is None]
    if (waiting := _look_for_the_lost(workers, now, limits, lost_elsewhere)) is not None:
        return waiting
    has_failed = any(_has_failed(worker, now) for worker in workers)
    first, evidence_due = _first_failures(workers), NEVER
    if first and _saves_evidence(first[0]):
        if limits.silence_s > 0 or has_failed:
            evidence_due = _evidence_deadline(first[0], limits)
        if now >= evidence_due:
            return _stop_for_silent_evidence(first[0], now)
        if has_failed:  # later: to stop them all would cut the evidence of the first off
            return Continue(until=evidence_due)
    elif has_failed:
        return _judge_failure(first, workers, now, limits, received)
    if all(worker.returncode == 0 for worker in workers):
        is_awaited = any(_is_running(w) and w.dismissal is Dismissal.AWAITED for w in everybody)
        return Continue() if is_awaited else Done()
    running = [w for w in workers if _is_running(w)]
    overdue = [w for w in running if now >= _silence_deadline(w, limits)]
    if overdue:
        return _stop_for_silence(min(overdue, key=lambda w: w.last_heard), workers, now, limits)
    silences = [_silence_deadline(w, limits) for w in running]
    lingers = [_linger_deadline(w) for w in running]
    earlies = [w.ended_at + limits.early_s for w in workers if w.returncode == 0]
    dues = (*silences, *lingers, *earlies, evidence_due)
    return Continue(until=min((due for due in dues if due > now), default=NEVER))


def ended_early(workers: Sequence[WorkerView], now: float, limits: Limits) -> list[WorkerView]:
    """The workers that ended well so long ago while others still work."""
    if all(worker.returncode is not None for worker in workers):
        return []
    ended = [w for w in workers if w.returncode == 0 and w.dismissal is None]
    return [worker for worker in ended if now >= worker.ended_at + limits.early_s]


def stop_for_signal(signum: int, ended: Collection[str] = ()) -> Stop:
    """We were told to end, or we forwarded a signal that `ended` workers without a handler for it:
    no worker is to blame."""
    which = f", which ended {', '.join(ended)}" if ended else ""
    return Stop(f"{signal.Signals(signum).name} received{which}", EXIT_SIGNAL_BASE + signum)


def stop_for_deadline(workers: Sequence[WorkerView], limits: Limits) -> Stop:
    """The time is up: who is known to have failed first is blamed now, without settling."""
    if first := _first_failures([w for w in workers if w.dismissal is None]):
        return _stop_for_failure(first)
    return Stop(f"the deadline of {limits.deadline_s:g} s is near", EXIT_PASS, is_deadline=True)


def _has_failed(worker: WorkerView, now: float) -> bool:
    if worker.returncode is not None:
        return worker.returncode != 0
    return now >= _linger_deadline(worker)


def _linger_deadline(worker: WorkerView) -> float:
    said = worker.confession
    return said.heard_at + LINGER_S if said is not None and said.final else NEVER


def _first_failures(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The culprit; or several, when nothing tells which of them came first; or none."""
    failed = own_failures(workers) or suspects(workers)
    first = min(failed, key=_failed_at, default=None)
    if first is None:
        return []
    if first.confession is not None:
        return [first]
    return [w for w in failed if w.confession is None and w.wake == first.wake]


def suspects(workers: Sequence[WorkerView]) -> list[WorkerView]:
    return [w for w in workers if w.returncode != 0 and (w.returncode or w.confession)]


def lost_a_peer(worker: WorkerView) -> bool:
    return worker.confession is not None and worker.confession.peer_lost


def own_failures(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Those that failed by themselves, whether they are dead by now or say so."""
    return [w for w in suspects(workers) if not lost_a_peer(w)]


def _look_for_the_lost(
    workers: Sequence[WorkerView], now: float, limits: Limits, elsewhere: Sequence[LostPeer]
) -> Continue | Stop | None:
    """Ranks that lost another one do not know why. If nothing else tells it, it is one that still
    runs, and that the others waited for in vain. None: there is no such question."""
    here = [worker for worker in workers if lost_a_peer(worker)]
    if not (here or elsewhere) or len(here) < len(suspects(workers)):
        return None
    told = [
        *(LostPeer(w.name, w.error or "", w.confession.heard_at) for w in here if w.confession),
        *elsewhere,
    ]
    heard_at = min(each.heard_at for each in told)
    missing = [w for w in workers if _is_running(w) and w not in here]
    if not here and not missing:
        return None  # ours are done
    is_untold = not missing and len(elsewhere) < limits.num_distant
    until = heard_at + (max(FOLLOW_S, limits.elsewhere_s) if is_untold else FOLLOW_S)
    if now < until:
        return Continue(until=until)
    first = min(here, key=_failed_at, default=None)
    one = told[0] if first is None else LostPeer(first.name, first.error or "", heard_at)
    said = f"{one.name}: {one.said}"
    if not missing:
        return Stop(f"every rank lost another one, and none tells why ({said})", EXIT_PEER_LOST)
    names = [w.name for w in missing]
    reason = f"{listed(names)} did not come where the others waited ({said})"
    return Stop(reason, EXIT_HANG, tuple(names), is_hang=True)


def _judge_failure(
    first: Sequence[WorkerView],
    workers: Sequence[WorkerView],
    now: float,
    limits: Limits,
    received: Collection[int],
) -> Continue | Stop:
    """Blame the first to fail, unless it did as it was asked. A later failure changes nothing here:
    that worker may have followed the same request in its own way, or died of the first failure; but
    what the first has told, the others get time for, too."""
    followed = {worker.name: request for worker in first if (request := _followed(worker))}
    if len(followed) == len(first) and received and set(followed.values()) <= set(received):
        return stop_for_signal(next(iter(followed.values())), followed)
    held_until = max((_known_at(w) + HOLD_S for w in first if w.name in followed), default=now)
    if now < held_until:
        return Continue(until=held_until)
    settling = _settle(first[0], workers, now, limits)
    if now < settling.until:
        return settling
    return _stop_for_all(workers) if _all_ended_alike(workers) else _stop_for_failure(first)


def _all_ended_alike(workers: Sequence[WorkerView]) -> bool:
    """With the same exit code, and the same last line; or as the same request asks."""
    if len(workers) < 2:
        return False
    if all(map(ended_by_itself, workers)):
        return len({(exit_code(worker), _said(worker)) for worker in workers}) == 1
    return len({_followed(worker) for worker in workers}) == 1 and bool(_followed(workers[0]))


def _said(worker: WorkerView) -> str:
    """Progress of a trainer tells nothing of its end."""
    is_progress = worker.last_step is not None
    return "" if is_progress else without_numbers(last_words(worker.last_lines))


def _stop_for_all(workers: Sequence[WorkerView]) -> Stop:
    code, names = exit_code(workers[0]), tuple(worker.name for worker in workers)
    # Some may have announced it, and not ended yet.
    returncode = next((w.returncode for w in workers if w.returncode is not None), code)
    how = f"{'was' if returncode < 0 else 'ended with'} {describe_exit(returncode)}"
    return Stop(f"every worker {how}", code, tied=names)


def follow_elsewhere(
    stop: Stop, heard_at: float, workers: Sequence[WorkerView], now: float, limits: Limits
) -> Continue | Stop:
    """The job ends on another node, and none of ours has failed. A rank there is to blame only if
    ours do not meet the same: what all ranks meet in one step, they tell within milliseconds."""
    first = stop.elsewhere
    if first is None or first.worker is None or not _may_be_shared(first.exit_code):
        return stop
    settling = _settling(first.worker, first.step, heard_at, workers, limits)
    return settling if now < settling.until else stop


def _settle(
    first: WorkerView, workers: Sequence[WorkerView], now: float, limits: Limits
) -> Continue:
    """Of one without an equal the other kinds tell whether every worker meets it."""
    others, took_s = [w for w in workers if w is not first], _took_s(first)
    if first.confession is None:
        return _settle_death(first, others, now, limits)
    if not _may_be_shared(first.confession.exit_code):
        return Continue(until=-NEVER)
    step = first.confession.step
    return _settling(first.name, step, _known_at(first), others, limits, took_s)


def _settle_death(
    first: WorkerView, others: Sequence[WorkerView], now: float, limits: Limits
) -> Continue:
    """Until all others have ended, too, or have come further, or a moment is over."""
    took_s, step = _took_s(first), None if first.last_step is None else first.last_step + 1
    age_s = took_s + AGE_S + limits.moment_s - MOMENT_S
    on_their_way = [
        w
        for w in others
        if _is_running(w)
        and not _has_passed(w, step)
        and not lost_a_peer(w)
        and not (w.is_idle and now - (w.started_at or 0.0) >= age_s)
    ]
    if not on_their_way or not ended_by_itself(first):
        return Continue(until=-NEVER)
    moment_s = LATE_MOMENT_S if took_s > LATE_S else took_s
    end = first.ended_at + max(limits.moment_s, moment_s)
    return Continue(min(end, now + IDLE_S))


def judges_a_death(workers: Sequence[WorkerView]) -> bool:
    """Whether it matters what the others do: `is_idle`."""
    return any(ended_by_itself(w) for w in workers if w.dismissal is None)


def ended_by_itself(worker: WorkerView) -> bool:
    """With an exit code of failure, or by a signal, and without a word to us."""
    is_own = worker.spawn_error is None and worker.oom is None and worker.confession is None
    return is_own and bool(worker.returncode)


def _may_be_shared(exit_code: int) -> bool:
    return exit_code < EXIT_SIGNAL_BASE and exit_code != EXIT_HANG


def _took_s(worker: WorkerView) -> float:
    """From its start until it failed."""
    return _known_at(worker) - (worker.started_at or 0.0)


def _settling(
    name: str,
    step: int | None,
    known_at: float,
    others: Sequence[WorkerView],
    limits: Limits,
    took_s: float = 0.0,
) -> Continue:
    """Until all others have shown whether they share what `name` has told, `took_s` after its
    start; who saves evidence of the same may end that. A rank that lost another one has shown
    it."""
    running = [w for w in others if _is_running(w)]
    saving = [_evidence_deadline(w, limits) for w in running if _saves_evidence(w)]
    unsettled = [w for w in running if w.confession is None and not _has_passed(w, step)]
    if not unsettled:
        return Continue(until=max(saving, default=-NEVER))
    if limits.is_job:  # over in less time than it takes to read a line about it
        return Continue(max([*saving, known_at + FOLLOW_S]))
    needed_s = (took_s if w.last_step is None else SETTLE_STEPS * w.step_s for w in unsettled)
    patience_s = max(SETTLE_S, *needed_s)
    where = "before its first step" if step is None else f"in step {step}"
    why = (
        f"{name} failed {where}: {patience_s:.0f} s at most for "
        f"{listed([w.name for w in unsettled])} to come further, or to fail there, too"
    )
    return Continue(max([*saving, known_at + patience_s]), why)


def _is_running(worker: WorkerView) -> bool:
    return worker.started_at is not None and worker.returncode is None


def _has_passed(worker: WorkerView, step: int | None) -> bool:
    return worker.last_step is not None and worker.last_step >= (step or 0)


def _followed(worker: WorkerView) -> signal.Signals | None:
    """The request that it ended by, if any. What it announced counts more than how it ended: a NaN
    is no request, even if a signal kills the worker afterwards."""
    code = worker.confession.exit_code if worker.confession else worker.returncode
    return None if code is None else request_of(code)


def _known_at(worker: WorkerView) -> float:
    """When we learned that it failed."""
    if worker.returncode is None and worker.confession is not None:
        return worker.confession.heard_at
    return worker.ended_at


def _failed_at(worker: WorkerView) -> float:
    return worker.confession.at if worker.confession else worker.ended_at


def _stop_for_failure(culprits: Sequence[WorkerView]) -> Stop:
    names = tuple(worker.name for worker in culprits)
    code = exit_code(culprits[0])
    if all(map(_is_fault_of_host, culprits)):
        return Stop(_describe_fault_of_host(culprits), code)
    if len(culprits) == 1:
        return Stop(_describe(culprits[0]), code, names)
    each = ", ".join(f"{w.name} ({_how(w)}{_oom(w)})" for w in culprits)
    reason = f"died within one reading, so none is named before the other: {each}"
    return Stop(reason, code, (), tied=names)


def _describe(worker: WorkerView) -> str:
    message = (worker.spawn_error or worker.error or "").strip()
    said = f": {message.splitlines()[0]}" if message else ""
    if worker.spawn_error is not None:
        return f"{worker.name} could not start{said}"
    return f"{worker.name} failed first: {_how(worker)}{_ran(worker)}{_oom(worker)}{said}"


def _describe_fault_of_host(workers: Sequence[WorkerView]) -> str:
    first = workers[0]
    if first.spawn_error is not None:
        return f"{_describe(first)}{FAULT_OF_HOST}"
    who = " and ".join(worker.name for worker in workers) + (" were" if workers[1:] else " was")
    return f"{who} {NO_HOST_MEMORY}{_ran(first)}{_oom(first)}{FAULT_OF_HOST}"


def _is_fault_of_host(worker: WorkerView) -> bool:
    """There was no process, no descriptor or no memory for it: that blames no GPU. What it had
    announced before counts more."""
    if worker.spawn_error is not None:
        return worker.returncode == EXIT_INTERNAL
    return worker.oom is not None and worker.confession is None


def _ran(worker: WorkerView) -> str:
    ran_s = (worker.ended_at or _failed_at(worker)) - (worker.started_at or 0.0)
    return f" after {ran_s:.1f} s"


def _how(worker: WorkerView) -> str:
    if worker.returncode is not None:
        return describe_exit(worker.returncode)
    return f"it announced exit code {exit_code(worker)}"


def _oom(worker: WorkerView) -> str:
    return f"; {worker.oom}" if worker.oom else ""


def exit_code(worker: WorkerView) -> int:
    """Of one that met a NaN and never said that it is done: the NaN's, whatever ended it."""
    said = worker.confession
    if said is not None and (worker.returncode is None or not said.final):
        return said.exit_code
    return 0 if worker.returncode is None else exit_code_of(worker.returncode)


def _stop_for_silence(
    first: WorkerView, workers: Sequence[WorkerView], now: float, limits: Limits
) -> Stop:
    """Of workers that all fell silent together none is named."""
    silent_s, limit_s = now - first.last_heard, _silence_limit_s(first, limits)
    together_s = _TOGETHER * limit_s
    is_shared = len(workers) > 1 and all(
        _is_running(w) and w.last_heard <= first.last_heard + together_s for w in workers
    )
    who = "every worker" if is_shared else first.name
    where = f" in phase {first.patient_phase}" if first.patient_phase else ""
    reason = f"{who} silent for {silent_s:.0f} s{where} (limit {limit_s:.0f} s)"
    if is_shared:
        names = tuple(worker.name for worker in workers)
        return Stop(reason, EXIT_HANG, tied=names, is_hang=True)
    return Stop(reason, EXIT_HANG, (first.name,), is_hang=True)


def _silence_limit_s(worker: WorkerView, limits: Limits) -> float:
    patience_s = limits.silence_s
    if not worker.patient_phase:
        # One that waits for another is silent from beat to beat: it does not hang.
        patience_s = max(worker.step_s, BEAT_S) if worker.step_s else 0.0
    return max(limits.silence_s, SILENCE_PATIENCE * patience_s)


def _silence_deadline(worker: WorkerView, limits: Limits) -> float:
    if limits.silence_s == 0 or _saves_evidence(worker):
        return NEVER
    return worker.last_heard + _silence_limit_s(worker, limits)


def _saves_evidence(worker: WorkerView) -> bool:
    said = worker.confession
    return worker.returncode is None and said is not None and not said.final


def _evidence_deadline(worker: WorkerView, limits: Limits) -> float:
    """When a worker that met a NaN, and says nothing since then, ends as what it confessed. It is
    never a hang. Before it saves, it computes its last step again."""
    said = worker.confession
    if said is None or not _saves_evidence(worker):
        return NEVER
    limit_s = limits.evidence_s + said.evidence_bytes / EVIDENCE_BYTES_PER_S
    limit_s += SILENCE_PATIENCE * worker.step_s
    return max(worker.last_heard, said.heard_at) + limit_s


def _stop_for_silent_evidence(worker: WorkerView, now: float) -> Stop:
    silent_s = now - worker.last_heard
    reason = (
        f"{worker.name} failed first: it met a NaN or Inf, and fell silent for {silent_s:.0f} s "
        "while it saved the evidence, which is not whole"
    )
    return Stop(reason, exit_code(worker), (worker.name,))
