"""What was found of each worker of a run that is over: of several things the one that decides its
row. Pure."""

from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import Any

from msgspec import Struct

from launcher.verdict.disagreement import Disagreement, Replay, quantity_name
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.record import FAULT_OF_HOST, NO_HOST_MEMORY, Case, WorkerEnd
from launcher.verdict.rules import Kind, Rule
from launcher.verdict.severity import CauseClass, Repeat, Severity, Symptom, worst
from launcher.verdict.shared import Peers, is_equal, peers_at, shared_failure
from launcher.verdict.trials import what_its_trial_showed
from model_check.errors import (
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    EXIT_USAGE,
    describe_exit,
    exit_code_of,
)
from model_check.events import NonFinite, again
from model_check.utils.requests import request_of
from model_check.utils.wire import NOT_WATCHED
from model_check.utils.words import few

ENOUGH_STEPS = 10
"""Compared steps with which a worker passes that its deadline ended."""
_BESIDE = {
    Peers.FINITE: Kind.NON_FINITE,
    Peers.FEWER_FINITE: Kind.NON_FINITE_IN_MOST,
    Peers.NOT_FINITE: Kind.NON_FINITE_EVERYWHERE,
    Peers.UNKNOWN: Kind.NON_FINITE_UNSETTLED,
}
_ALONE = {
    True: (Kind.NON_FINITE_EVERYWHERE, Repeat.PERSISTENT),
    False: (Kind.NON_FINITE_ONCE, Repeat.TRANSIENT),
    None: (Kind.NON_FINITE_UNSETTLED, Repeat.NOT_REPLAYED),
}
"""By whether it came again when the step was computed again; None: not tried."""
_AFTER_REPLAYS = {
    Repeat.NOT_REPLAYED: "",
    Repeat.TRANSIENT: "_ONCE",
    Repeat.UNSETTLED: "_UNSETTLED",
    Repeat.INTERMITTENT: "_AGAIN",
    Repeat.PERSISTENT: "_AGAIN",
}


class Finding(Struct, frozen=True):
    kind: Kind
    values: dict[str, Any] = {}
    """What its sentence needs."""
    symptoms: Sequence[Symptom] = ()
    """Of its GPU: the gravest tells class and severity."""

    @property
    def rule(self) -> Rule:
        return self.kind.rule

    @property
    def sentence(self) -> str:
        return self.rule.sentence.format(**self.values)

    @property
    def classed(self) -> tuple[CauseClass | None, Severity | None]:
        if not self.symptoms:
            return self.rule.classed
        gravest = worst(self.symptoms)
        return gravest.cause_class, gravest.severity

    @property
    def is_of_replays(self) -> bool:
        """Whether a replay tells more of it."""
        return self.kind.name.startswith(("ODD", "STATE_CHANGED", "FAILED_TRIAL"))


Findings = Mapping[str, Finding]
"""By the worker."""


def findings_of(case: Case) -> dict[str, Finding]:
    """Of each worker the one that decides its row."""
    return {worker.name: _finding(case, worker) for worker in case.workers}


def _finding(case: Case, worker: WorkerEnd) -> Finding:
    """The first that is found. What ended the run comes before what it brought about."""
    looks = [*_BITS_FIRST] if case.end.is_by_bits else []
    for look in (_variation, *looks, *_IN_ORDER):
        if (found := look(case, worker)) is not None:
            return found
    return _passed(case, worker)


def _variation(case: Case, worker: WorkerEnd) -> Finding | None:
    """A replay clears this worker: a healthy one of its kind varies."""
    if not (case.all_facts[worker.name].broken or _difference_of(case, worker)):
        return None
    for replay in case.end.replays:
        if replay.is_software and any(is_equal(case, worker.name, n) for n in replay.suspects):
            kind = Kind.VARIES if case.record.checked is None else Kind.COMMAND_VARIES
            return Finding(kind, {"said": replay.said})
    return None


def _trial(case: Case, worker: WorkerEnd) -> Finding | None:
    """However it ended: one that may take no other kernel ends by itself."""
    difference = _difference_of(case, worker)
    if difference is None or not difference.is_of_trial:
        return None
    told = case.all_facts[worker.name].detail
    values = _values(case, worker, difference)
    values |= {"shown": what_its_trial_showed(worker.name, difference, told)}
    if worker.name in case.suspects and worker.name in (*difference.odd, *case.odd_by_replay):
        return Finding(_after_replays("FAILED_TRIAL", case, worker), values)
    return Finding(Kind.TRIALS_DIFFER, values) if _is_apart(case, worker, difference) else None


def _odd_unless_changed(case: Case, worker: WorkerEnd) -> Finding | None:
    return None if case.all_facts[worker.name].broken else _odd(case, worker)


def _odd(case: Case, worker: WorkerEnd) -> Finding | None:
    """Its equals, other nodes or a golden file name it."""
    if worker.name not in case.suspects:
        return None
    difference, golden = _difference_of(case, worker), case.record.golden
    kind, checked = _after_replays("ODD", case, worker), case.record.checked
    if kind is Kind.ODD_ONCE and checked is not None and not checked.deterministic:
        kind = Kind.ODD_ONCE_OF_COMMAND
    if difference is not None and worker.name in case.odd_by_replay:
        return Finding(kind, _values(case, worker, difference) | {"whom": "its peer"})
    if difference is not None and worker.name in difference.odd:
        return Finding(kind, _values(case, worker, difference) | {"whom": "the majority"})
    if case.end.elsewhere is not None and worker.name in case.end.culprits:
        values = {"place": f"step {case.end.elsewhere.step}", "repeat": Repeat.NOT_REPLAYED}
        return Finding(kind, values | {"whom": "the other nodes"})
    standing = None if golden is None else golden.of(worker.name)
    if golden is None or standing is None or standing.disagreement is None:
        return None
    return Finding(kind, _values(case, worker, standing.disagreement) | {"whom": golden.label})


def _failure(case: Case, worker: WorkerEnd) -> Finding | None:
    """What this worker did wrong by itself, whatever stopped it later."""
    if _request(case, worker) is not None:
        return None
    for look in (_lost_peer, _not_started, _hang, _not_finite, _changed, _not_repeated, _mismatch):
        if (found := look(case, worker)) is not None:
            return found
    return _ended_badly(case, worker)


def _lost_peer(case: Case, worker: WorkerEnd) -> Finding | None:
    done = case.all_facts[worker.name].done
    if done is None or not done.peer_lost or worker.name in case.end.culprits:
        return None
    return Finding(Kind.PEER_LOST, {"said": _error(case, worker)})


def _not_started(case: Case, worker: WorkerEnd) -> Finding | None:
    if not worker.spawn_error:
        return None
    is_of_host = worker.returncode == EXIT_INTERNAL
    values = {"spawn_error": worker.spawn_error, "whose": FAULT_OF_HOST}
    return Finding(Kind.NO_PROCESS if is_of_host else Kind.NOT_STARTED, values)


def _hang(case: Case, worker: WorkerEnd) -> Finding | None:
    if not case.end.is_hang or worker.name not in (*case.end.culprits, *case.end.tied):
        return None
    kind = Kind.HANG if case.end.culprits else Kind.HANG_ALIKE
    return Finding(kind, {"reason": case.end.reason})


def _not_finite(case: Case, worker: WorkerEnd) -> Finding | None:
    bad = case.all_facts[worker.name].nonfinite
    if bad is None:
        return None
    peers = peers_at(case, worker.name, bad.step)
    kind, repeat = _ALONE[bad.repeated]
    if peers is not Peers.NONE:
        kind = _BESIDE[peers]
    values = {"where": bad.where, "step": bad.step, "born": born(bad), "repeat": repeat}
    return Finding(kind, values)


def born(bad: NonFinite) -> str:
    """Where it was born, for the end of a sentence; nothing where that is not known."""
    if bad.origin is not None:
        return f", born in {bad.origin.place}: {bad.origin.counts}{again(bad.repeated)}"
    return f", in {few(bad.names)}" if bad.names else ""


def _changed(case: Case, worker: WorkerEnd) -> Finding | None:
    """What it keeps from one update to the next."""
    broken = case.all_facts[worker.name].broken
    if broken is None:
        return None
    values = {"what": broken.what} | _repeat_values(case, worker)
    if case.changed_alike:
        return Finding(Kind.STATE_CHANGED_ALIKE, values)
    if worker.name not in case.suspects:
        return Finding(Kind.STATE_CHANGED_BESIDE, values)
    return Finding(_after_replays("STATE_CHANGED", case, worker), values)


def _not_repeated(case: Case, worker: WorkerEnd) -> Finding | None:
    """The passes of its first step gave other bits when they were computed twice."""
    if case.all_facts[worker.name].repeated is not False:
        return None
    if _kernels_vary(case, worker):
        return Finding(Kind.UNREPEATABLE)
    return None if worker.name in case.suspects else Finding(Kind.NOT_REPEATED)


def _kernels_vary(case: Case, worker: WorkerEnd) -> bool:
    """Whether the run ended of that, or more than this one's first step did not repeat itself, or
    it has no equal."""
    if case.end.exit_code == EXIT_USAGE and worker.name in case.end.culprits:
        return True
    equals = [n for n in case.all_facts if is_equal(case, worker.name, n)]
    return len(equals) == 1 or sum(case.all_facts[n].repeated is False for n in equals) > 1


def _mismatch(case: Case, worker: WorkerEnd) -> Finding | None:
    mismatch = case.end.mismatch
    if mismatch is None or worker.name not in mismatch.values:
        return None
    kind = Kind.STARTS_DIFFER if mismatch.is_of_command else Kind.NOT_COMPARABLE
    return Finding(kind, {"mismatch": mismatch})


def _ended_badly(case: Case, worker: WorkerEnd) -> Finding | None:
    end, facts = case.end, case.all_facts[worker.name]
    announced, error = _announced(facts), _error(case, worker)
    is_blamed = worker.name in end.culprits
    if shared_failure(case, worker.name) is not None:
        code = announced or worker.returncode or 0
        kind = Kind.REFUSED_ALIKE if code == EXIT_USAGE else Kind.FAILED_ALIKE
        return _failed(kind, worker, facts, code, error if facts.done else worker.last_error)
    if worker.oom and announced == EXIT_PASS:
        how = f"{NO_HOST_MEMORY}{_where(facts)}"
        values = {"how": how, "oom": f"; {worker.oom}", "whose": FAULT_OF_HOST}
        return Finding(Kind.NO_HOST_MEMORY, values)
    if worker.returncode and not worker.stopped_by_us:
        said = error or worker.last_error
        is_refused = worker.returncode == EXIT_USAGE and said and len(case.workers) == 1
        kind = Kind.REFUSED if is_refused else Kind.FAILED
        return _failed(kind, worker, facts, worker.returncode, said)
    is_stopped_for = is_blamed and announced == end.exit_code
    if announced != EXIT_PASS and (is_stopped_for or announced < EXIT_SIGNAL_BASE):
        return _failed(Kind.FAILED, worker, facts, announced, error)
    return None


def _failed(
    kind: Kind, worker: WorkerEnd, facts: WorkerFacts, returncode: int, error: str | None
) -> Finding:
    how = f"{describe_exit(returncode)}{_where(facts, tells_phase=not error)}"
    said, oom = f": {error}" if error else "", f"; {worker.oom}" if worker.oom else ""
    values = {"how": how, "said": said, "oom": oom, "exit_code": exit_code_of(returncode)}
    return Finding(kind, values)


def _where(facts: WorkerFacts, tells_phase: bool = True) -> str:
    after = "" if facts.last_step is None else f" after step {facts.last_step}"
    phase = "" if facts.phase is None or not tells_phase else f" in phase {facts.phase}"
    return f"{after}{phase}"


def _disputed(case: Case, worker: WorkerEnd) -> Finding | None:
    """Beside one that is odd, it differs from others in a later quantity."""
    difference = _difference_of(case, worker)
    if difference is None or not difference.dispute or worker.name not in difference.disputed:
        return None
    place = f"step {difference.step}, {quantity_name(difference.dispute.quantity)}"
    return Finding(Kind.DIFFERS, _values(case, worker, difference) | {"place": place})


def _strayed(case: Case, worker: WorkerEnd) -> Finding | None:
    said = next((r.said for r in case.end.replays if r.doubted == worker.name), None)
    return Finding(Kind.STRAYED, {"said": said}) if said else None


def _apart(case: Case, worker: WorkerEnd) -> Finding | None:
    difference = _difference_of(case, worker)
    if difference is None or not _is_apart(case, worker, difference):
        return None
    return Finding(Kind.DIFFERS, _values(case, worker, difference))


def _is_apart(case: Case, worker: WorkerEnd, difference: Disagreement) -> bool:
    """Whether it is one of those that differ, and of whom none is named."""
    doubted = set(difference.odd).intersection(case.doubted)
    if doubted:
        return worker.name in doubted
    return worker.name in difference.bits and not difference.bits.keys() & case.suspects


def _unfinished(case: Case, worker: WorkerEnd) -> Finding | None:
    """It did nothing wrong, and not all of its steps."""
    if worker.pid is None:
        return Finding(Kind.NEVER_STARTED)
    if worker.returncode is None:
        return Finding(Kind.END_UNSEEN)
    facts, steps = case.all_facts[worker.name], case.record.steps
    done = facts.done
    # What this worker had to train itself; None: a foreign command.
    to_do = None if steps is None else max(0, steps - facts.first_step)
    has_done_all = done and done.exit_code == EXIT_PASS and facts.num_steps == to_do
    request = _request(case, worker)
    if request and not has_done_all:
        return Finding(Kind.STOPPED_BY_SIGNAL, {"signal": request.name})
    if worker.stopped_by_us and not has_done_all and case.end.is_deadline:
        return _by_deadline(case, worker)
    if worker.stopped_by_us and not has_done_all:
        return Finding(Kind.STOPPED_ON_REQUEST if case.end.is_by_signal else Kind.STOPPED)
    if done and done.early is not None:
        return Finding(Kind.ENDED_EARLY, {"why": done.early})
    if to_do not in (None, facts.num_steps):
        return Finding(Kind.TOO_FEW_STEPS, {"done": facts.num_steps, "to_do": to_do})
    return None if case.record.checked is None else _unwatched(case, worker)


def _unwatched(case: Case, worker: WorkerEnd) -> Finding | None:
    """A checked command ended well: was it seen to its end? It says so itself."""
    facts = case.all_facts[worker.name]
    equals = [f for n, f in case.all_facts.items() if is_equal(case, worker.name, n)]
    to_do = max(each.num_steps for each in equals)
    why = next((f": {note}" for note in facts.notes if note.startswith(NOT_WATCHED)), "")
    if not facts.num_steps:
        return Finding(Kind.NOT_WATCHED, {"why": why})
    if facts.done is not None and facts.num_steps == to_do:
        return None
    why = why or (f": its equals did {to_do}" if facts.num_steps < to_do else "")
    return Finding(Kind.NOT_WATCHED_TO_END, {"done": facts.num_steps, "why": why})


def _by_deadline(case: Case, worker: WorkerEnd) -> Finding:
    alone = case.all_facts[worker.name].num_steps
    done = case.agreed_steps.get(worker.name, alone)
    if done >= ENOUGH_STEPS:
        return _passed(case, worker)
    what = f"{done} steps compared, {ENOUGH_STEPS} are enough"
    if case.record.steps is None and case.record.checked is None:
        what = "had not ended when the time was up"
    return Finding(Kind.TOO_SOON, {"what": what})


def _passed(case: Case, worker: WorkerEnd) -> Finding:
    """With what a golden file tells of it."""
    golden = case.record.golden
    standing = None if golden is None else golden.of(worker.name)
    if golden is None or standing is None:
        return Finding(Kind.PASSED)
    if not standing.is_comparable:
        return Finding(Kind.NO_GOLDEN, {"whom": golden.label, "reasons": standing.why})
    if standing.disagreement is not None and case.is_unlike_golden:
        return Finding(Kind.UNLIKE_GOLDEN, {"whom": golden.label, "place": standing.place})
    return Finding(Kind.PASSED)


_Look = Callable[[Case, WorkerEnd], Finding | None]
_BITS_FIRST: Sequence[_Look] = (_trial, _odd_unless_changed)
"""Where bits ended the run."""
_IN_ORDER: Sequence[_Look] = (_failure, _odd, _disputed, _strayed, _apart, _unfinished)


def _values(case: Case, worker: WorkerEnd, difference: Disagreement) -> dict[str, Any]:
    place = f"step {difference.step}, {difference.place}"
    return {"place": place} | _repeat_values(case, worker)


def _repeat_values(case: Case, worker: WorkerEnd) -> dict[str, Any]:
    """What its replays showed, and in words: how often it was wrong, what it did of two."""
    found = _replay_of(case, worker)
    of_two = ""
    if found.odd:
        which = "other" if worker.name == found.odd else "the same"
        of_two = f"; computed again it gave {which} bits"
    right = f"right in {found.times} replay{'s' * (found.times != 1)}"
    again = {"again": f"wrong again in {found.how_often}", "right": right, "of_two": of_two}
    return {"repeat": found.repeat_of(worker.name)} | again


def _after_replays(kind: str, case: Case, worker: WorkerEnd) -> Kind:
    return Kind[f"{kind}{_AFTER_REPLAYS[_replay_of(case, worker).repeat_of(worker.name)]}"]


def _replay_of(case: Case, worker: WorkerEnd) -> Replay:
    """Of this worker alone, else of two that differ."""
    found = [replay for replay in case.end.replays if worker.name in replay.suspects]
    return min(found, key=lambda replay: len(replay.suspects), default=Replay(to_step=0))


def _difference_of(case: Case, worker: WorkerEnd) -> Disagreement | None:
    """The one that names it; else the last in which it has part."""
    found = [each for each in case.end.disagreements if worker.name in each.bits]
    named = [each for each in found if worker.name in each.odd]
    return next(iter(named), None) or next(reversed(found), None)


def _request(case: Case, worker: WorkerEnd) -> Signals | None:
    """The request that ended this worker and that we got, too. None: another one, or a failure."""
    facts = case.all_facts[worker.name]
    is_blamed = worker.name in (*case.end.culprits, *case.end.tied)
    if is_blamed or worker.stopped_by_us or facts.nonfinite:
        return None
    request = request_of(_announced(facts) or worker.returncode or EXIT_PASS)
    return request if request in case.end.requests else None


def is_unordered(case: Case, worker: WorkerEnd) -> bool:
    """Whether it is unknown if this worker failed by itself: several failed together, or we were
    asked to end before its death was judged. Then it may have been asked, too, and have ended in
    its own way. A failure that it told itself stays a failure."""
    facts = case.all_facts[worker.name]
    has_said = facts.nonfinite or _announced(facts) or worker.spawn_error
    return worker.name in case.end.tied or (case.end.is_by_signal and not has_said)


def _announced(facts: WorkerFacts) -> int:
    """The exit code that the worker announced; 0 if it announced none."""
    return facts.done.exit_code if facts.done else EXIT_PASS


def _error(case: Case, worker: WorkerEnd) -> str | None:
    """Why it ended, as it announced."""
    done = case.all_facts[worker.name].done
    return done.error.splitlines()[0] if done and done.error else None
