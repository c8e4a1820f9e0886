"""What it means that the steps to a difference, computed again, differ again or not. Pure.

A suspect and all healthy workers compute them, as often as it takes: `alone.Tally` weighs how often
the suspect was wrong beside healthy ones that never were.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from launcher.verdict.agreement import DIVIDING, MUST_MATCH, TAKEN, compare
from launcher.verdict.alone import Tally, is_majority
from launcher.verdict.disagreement import CALLS, REPEATED, VARIED, Disagreement, Replay, explain
from launcher.verdict.facts import WorkerFacts, changed_alike
from launcher.verdict.live import Watch
from launcher.verdict.observer import NEVER, Dismissal, Observer
from launcher.verdict.pace import Pace
from launcher.verdict.record import RunEnd, Stop
from launcher.verdict.settling import GO_S
from launcher.verdict.severity import Repeat
from launcher.verdict.trials import outcomes
from model_check.errors import EXIT_HANG, EXIT_USAGE
from model_check.events import (
    AskVectors,
    Break,
    Command,
    Event,
    Go,
    NonFinite,
    Phase,
    Scalar,
    Step,
    Vectors,
)
from model_check.utils.fingerprint import BEFORE, INPUTS
from model_check.utils.trials import PASSED, trials_in
from model_check.utils.wire import CALLS_BITS
from model_check.utils.words import listed

Record = Mapping[int, Step]
"""Step -> what a worker told of it."""


class Question(Struct, frozen=True):
    """What a replay is to answer."""

    to_step: int
    """The step of the fault."""
    suspects: tuple[str, ...]
    """The worker that is named; where nobody is, two that differ."""
    healthy: tuple[str, ...] = ()
    """Those that compute beside it. Empty: there are none, or nobody is named."""
    is_named: bool = True
    sound_to: int = -1
    """After this step the state of a suspect that is alone was as it had to be."""
    begin_by: int = 0
    """A state after so many steps, or fewer, is older than the fault."""
    has_changed: bool = False
    """The suspect's state changed by itself, which it tells without others."""
    trial: str = ""
    """The trial of a kernel that the suspect failed. Empty: its steps are asked."""
    of_command: bool = False
    """A person's own command is computed again, whose operations are likelier to vary than ours."""

    def what(self, from_step: int) -> str:
        """Is computed again."""
        return self.trial or f"steps {from_step} to {self.to_step}"

    @property
    def why_not(self) -> str | None:
        """Why no replay could answer it; None: one can."""
        can_tell = self.healthy or self.has_changed or not self.is_named or self.sound_to >= 0
        return None if can_tell else "of no other worker here it is known that it is right"

    @property
    def workers(self) -> tuple[str, ...]:
        return (*self.suspects, *self.healthy)


class Attempt(Struct, frozen=True, kw_only=True):
    """The steps, computed again once."""

    wrong: Mapping[str, Disagreement] = {}
    """Worker -> where it first gave wrong bits; of two that differ, other bits than in the run."""
    finished: tuple[str, ...] = ()
    """Those that computed all steps."""
    disagreement: Disagreement | None = None
    """The first between the suspect and a healthy one, or between two that differ."""
    why_not: str | None = None
    """Why it tells nothing of the suspects; None: it does."""

    @property
    def right(self) -> tuple[str, ...]:
        """Those that computed all steps, and gave the right bits."""
        return tuple(name for name in self.finished if name not in self.wrong)


def questions_of(watch: Watch) -> list[Question]:
    """One for each fault of bits, but for validation losses: no step shows them; and for each trial
    of a kernel that no more than half of the equals failed."""
    if changed_alike(watch.all_facts):
        return []
    broken = {name: h.broken for name, h in watch.all_facts.items() if h.broken}
    found = [each for each in watch.disagreements if " " not in each.quantity]
    odd = {name: each for each in reversed(found) for name in each.odd}
    unnamed = [each for each in found if _is_unnamed(each, watch)]
    named = dict.fromkeys([*(name for each in found for name in each.odd), *broken])
    questions = [
        *(Question(each.step, each.two_that_differ, is_named=False) for each in unnamed),
        *(_question_of(name, odd.get(name), broken.get(name), watch) for name in named),
        *(asked for each in watch.disagreements for asked in _of_trial(each, watch)),
    ]
    return [replace(each, of_command=watch.command is not None) for each in questions]


def _of_trial(found: Disagreement, watch: Watch) -> Iterator[Question]:
    """Where most fail, it may be the kernel."""
    if not found.is_of_trial:
        return
    failed = [name for name, shown in found.bits.items() if shown != PASSED]
    if is_majority(len(failed), len(found.bits)):
        return
    to_step = max(watch.all_facts[name].first_step for name in found.bits)
    passed = tuple(name for name in found.bits if name not in (*failed, *found.others))
    for name in failed:
        yield Question(to_step, (name,), passed, trial=found.quantity)


def _is_unnamed(found: Disagreement, watch: Watch) -> bool:
    """Whether nobody is: neither by a majority nor since its state changed by itself."""
    return not found.odd and all(watch.all_facts[name].broken is None for name in found.bits)


def _question_of(
    name: str, found: Disagreement | None, change: Break | None, watch: Watch
) -> Question:
    """Each suspect is asked by itself: what another one does ends no replay of this one."""
    steps = [each.step for each in (found, change) if each is not None]
    sound_to = -1 if change is None or change.since is None else change.since
    begins = [sound_to + 1] if change is not None else []
    begins += [_begin_by(found, watch.all_facts[name].turn)] if found is not None else []
    return Question(
        to_step=max(steps),
        suspects=(name,),
        healthy=_healthy(watch, name, max(steps)),
        sound_to=sound_to,
        begin_by=min(begins),
        has_changed=change is not None,
    )


def _begin_by(found: Disagreement, turn: int | None) -> int:
    """What differs at a step was looked at a whole turn before at the latest, and equal then. What
    differs before the update may have changed behind the step before."""
    if turn is None:
        return 0
    late = turn if turn > 1 else 0
    return max(0, found.step - late - found.quantity.startswith(BEFORE))


def question_about(worker: str, watch: Watch) -> Question | None:
    """To the last step of a worker that nobody named; None: it told none."""
    last = watch.all_facts[worker].last_step
    if last is None:
        return None
    healthy, of_command = _healthy(watch, worker, last), watch.command is not None
    return Question(last, (worker,), healthy, sound_to=last, begin_by=last, of_command=of_command)


def _healthy(watch: Watch, worker: str, to_step: int) -> tuple[str, ...]:
    """The equals of `worker` against whom nothing is known, those that came furthest first; those
    that told this step, if any did."""
    differ = [each for each in watch.disagreements if " " not in each.quantity]
    doubted = (
        each.bits if _is_unnamed(each, watch) else (*each.odd, *each.disputed) for each in differ
    )
    known = {worker, *(name for names in doubted for name in names)}
    equals = {n: watch.all_facts[n] for n in watch.agreement.equals(worker) if n not in known}
    steps = {
        n: h.last_step for n, h in equals.items() if _is_healthy(h) and h.last_step is not None
    }
    found = [n for n, last in steps.items() if last >= to_step] or steps
    return tuple(sorted(found, key=lambda name: -steps[name]))


def _is_healthy(facts: WorkerFacts) -> bool:
    is_sound = facts.broken is None and facts.nonfinite is None
    return is_sound and facts.repeated is not False


class ReplayWatch(Observer):
    """Holds each replay against what the healthy workers told in the run, and these in step."""

    def __init__(
        self,
        question: Question,
        records: Mapping[str, Record],
        all_facts: Mapping[str, WorkerFacts],
        limit_s: float,
    ) -> None:
        """`all_facts`: of the run. `limit_s`: how long this attempt may take."""
        self._question, self._records, self._limit_s = question, records, limit_s
        self._of_run = all_facts
        self._all_facts = {name: WorkerFacts() for name in question.workers}
        self._steps: dict[str, dict[int, Step]] = {name: {} for name in question.workers}
        self._vectors: dict[tuple[str, int], Vectors] = {}
        self._pace = Pace(question.workers, max_lead=1)
        self._wrong: dict[str, Disagreement] = {}
        self._called_again: dict[str, dict[str, Scalar]] = {}
        """Worker -> what came of the calls of its last step, made again."""
        self._tried: set[str] = set()
        """Those that told the trial that is asked."""
        self._incomparable: str | None = None
        """Why these replays tell nothing of the run."""
        self._until = self._give_up_at = NEVER
        self._dismissal = Dismissal.AWAITED
        """Of suspects that are wrong: they may still tell of what."""
        self._lost: set[str] = set()
        """Healthy ones that ended early."""
        self._commands: list[tuple[str, Command]] = self._pace.more_credit()

    @property
    def due(self) -> float:
        return min(self._until, self._give_up_at)

    @property
    def dismissed(self) -> Mapping[str, Dismissal]:
        """A suspect that is known to be wrong, and a healthy one that has gone while another one is
        here: the others go on. All, where they told the trial that is asked."""
        if self._question.trial and self._tried.issuperset(self._question.workers):
            return dict.fromkeys(self._question.workers, Dismissal.GIVEN_UP)
        wrong = [name for name in self._question.suspects if name in self._wrong]
        has_witness = len(self._lost) < len(self._question.healthy)
        return dict.fromkeys(wrong, self._dismissal) | dict.fromkeys(
            self._lost if has_witness else (), Dismissal.GIVEN_UP
        )

    def on_event(self, worker: str, event: Event) -> Stop | None:
        self._all_facts[worker].record(event)
        match event:
            case Phase(detail=detail) if any(key.startswith(CALLS_BITS) for key in detail):
                self._called_again[worker] = detail
            case Phase(name="build" | "train"):
                self._compare_what_it_is(worker, event)
                self._look_at_trial(worker, event)
            case Step() if event.step <= self._question.to_step and not self._question.trial:
                self._steps[worker][event.step] = event
                self._hold_against_run(worker, event)
                self._ask_at(event.step)
            case NonFinite():
                self._is_not_finite(worker, event)
            case Break():
                self._is_wrong(worker, Disagreement(event.step, event.what, {}))
            case Vectors():
                self._vectors[worker, event.step] = event
        self._pace.on_event(worker, event)
        self._guide()
        return self._stop()

    def on_end(self, worker: str) -> None:
        if worker in self._question.healthy and not self._all_facts[worker].is_finished:
            self._lost.add(worker)
        self._pace.leave(worker)
        self._guide()

    def tick(self, now: float) -> Stop | None:
        self._until = min(self._until, now + self._limit_s)
        if self._pace.is_finished:
            self._give_up_at = min(self._give_up_at, now + GO_S)
        if now >= self._give_up_at:
            self._give_up_at, self._dismissal = NEVER, Dismissal.GIVEN_UP
        if now >= self._until:
            return Stop(f"the replay took longer than {self._limit_s:.0f} s", EXIT_HANG)
        return None

    def commands(self) -> list[tuple[str, Command]]:
        told, self._commands = self._commands, []
        return told

    def attempt(self, end: RunEnd) -> Attempt:
        """`end`: how the run of the replays ended."""
        if self._incomparable is not None:
            return Attempt(why_not=self._incomparable)
        question, found = self._question, self._disagreement()
        self._judge_calls()
        suspect = question.suspects[0]
        if found is not None and question.is_named:  # at steps that the run told otherwise, too
            self._wrong.setdefault(suspect, found)
        finished = tuple(name for name in question.workers if self._has_finished(name))
        are_known = all(name in finished or name in self._wrong for name in question.suspects)
        varies = bool(_varying(question, self._wrong))
        return Attempt(
            wrong=self._wrong,
            finished=finished,
            disagreement=found,
            why_not=None if are_known or varies else end.reason or "its workers ended early",
        )

    def _judge_calls(self) -> None:
        """Healthy workers whose state is equal, and whose calls differ, as often as all made them.
        Calls do not explain what changed by itself."""
        question = self._question
        names = [name for name in question.healthy if name not in self._wrong]
        told = {n: self._called_again[n] for n in names if n in self._called_again}
        if question.has_changed or len(told) < 2:
            return
        shared = set.intersection(*({*detail} for detail in told.values()))
        for key in (key for key in shared if key.startswith(CALLS_BITS)):
            bits = {name: str(detail[key]) for name, detail in told.items()}
            if len({*bits.values()}) > 1:
                self._wrong |= dict.fromkeys(bits, Disagreement(question.to_step, CALLS, bits))

    def _has_finished(self, worker: str) -> bool:
        facts = self._all_facts[worker]
        is_over = facts.num_steps > 0 and facts.is_finished
        return worker in self._tried if self._question.trial else is_over

    def _guide(self) -> None:
        """Nobody waits for a suspect that is wrong; it goes with the others, once."""
        self._commands += self._pace.more_credit()
        if self._pace.is_finished and (told := self._pace.let_go()):
            names = [name for name in self._question.suspects if name in self._wrong]
            self._commands += [*told, *((name, Go()) for name in names)]

    def _stop(self) -> Stop | None:
        if self._incomparable is not None:
            return Stop(f"replay: {self._incomparable}", EXIT_USAGE)
        varying = _varying(self._question, self._wrong)
        if _is_of_software(self._question, varying):
            what = f"replay: {listed(list(varying))} gave other bits than in the run"
            return Stop(what, EXIT_USAGE)
        return None

    def _compare_what_it_is(self, worker: str, event: Phase) -> None:
        """Its device, software and data, with those of the run; its kernels follow from the trial,
        where that is asked."""
        said, is_of_steps = self._of_run[worker].detail, not self._question.trial
        follows = () if is_of_steps else TAKEN
        for key in (key for key in (*MUST_MATCH, *DIVIDING) if key not in follows):
            was, now = said.get(key), event.detail.get(key)
            if key in said and key in event.detail and was != now:
                self._is_not_comparable(f"{key} {was} in the run, {now} now")
        if not is_of_steps:
            return
        before, again = outcomes(said), outcomes(event.detail)
        if any(before[trial] != again[trial] for trial in before.keys() & again.keys()):
            self._is_not_comparable(f"trials of {worker}'s kernels went otherwise than in the run")

    def _look_at_trial(self, worker: str, event: Phase) -> None:
        trial = self._question.trial
        if (shown := trials_in(event.detail).get(trial)) is None:
            return
        self._tried.add(worker)
        if shown != PASSED:
            self._is_wrong(worker, Disagreement(0, trial, {worker: shown}))

    def _told_in_run(self, worker: str, step: int) -> Step | None:
        """What is right, as far as it is known: a suspect's own word counts for what it computed
        from a state that was sound, and where nobody is named, for whether it does the same."""
        question = self._question
        if not question.is_named or (not question.healthy and step <= question.sound_to):
            return self._records[worker].get(step)
        own = (worker,) if worker in question.healthy else ()
        records = (self._records[name] for name in (*own, *question.healthy))
        return next((record[step] for record in records if step in record), None)

    def _hold_against_run(self, worker: str, step: Step) -> None:
        recorded, question = self._told_in_run(worker, step.step), self._question
        found = compare({"the run": recorded, "the replay": step}) if recorded else None
        is_first = self._all_facts[worker].num_steps == 1
        if found and worker in question.healthy:
            if is_first and found.quantity.startswith(BEFORE):
                what = found.place.removesuffix(" before the update")
                self._is_not_comparable(f"{worker} began with other {what} than the run")
            elif found.quantity == INPUTS:
                self._is_not_comparable(f"step {step.step} of {worker} had another batch")
        if step.repeated is False and found is None:
            found = Disagreement(step.step, REPEATED, {worker: VARIED})
        if found is not None:
            self._is_wrong(worker, found)

    def _is_not_finite(self, worker: str, event: NonFinite) -> None:
        """Where the run had finite numbers."""
        if self._told_in_run(worker, event.step) is not None:
            where = Disagreement(event.step, f"non-finite {event.where}", {})
            self._is_wrong(worker, where)

    def _is_wrong(self, worker: str, found: Disagreement) -> None:
        if worker in self._wrong:
            return
        self._wrong[worker] = found
        if worker in self._question.suspects:
            self._ask_at(found.step)
            if self._question.is_named:
                self._pace.leave(worker)

    def _ask_at(self, step: int) -> None:
        """The suspect and a healthy one tell the fingerprints of the step in which it is wrong."""
        pair = self._pair
        at = [self._wrong[name].step for name in pair if name in self._wrong]
        if at[:1] == [step] and len(pair) > 1 and all(step in self._steps[name] for name in pair):
            self._commands += [(name, AskVectors(step=step)) for name in pair]

    @property
    def _pair(self) -> tuple[str, ...]:
        """The suspect and a healthy one that is right; or the two that differ."""
        right = (name for name in self._question.healthy if name not in self._wrong)
        return (*self._question.suspects, *right)[:2]

    def _is_not_comparable(self, why: str) -> None:
        """The first reason stays: a worker may tell more until it is gone."""
        self._incomparable = self._incomparable or f"not comparable: {why}"

    def _disagreement(self) -> Disagreement | None:
        """With the first tensor that differs, where that was told."""
        pair = self._pair
        for step in sorted(set.intersection(*(set(self._steps[name]) for name in pair))):
            found = compare({name: self._steps[name][step] for name in pair})
            if found is not None:
                at = {n: self._vectors[n, step] for n in pair if (n, step) in self._vectors}
                return explain(found, at)
        return None


def is_open(question: Question, attempts: Sequence[Attempt]) -> bool:
    """Whether the steps must be computed once more before anything is said for good."""
    if attempts[-1].why_not or _varying(question, _first_wrong(attempts)):
        return False
    if question.is_named:
        worker = question.suspects[0]
        return _early(worker, question, attempts) is None and _tally(question, attempts).is_open
    found = _odd_of_two(question, attempts)
    return found is not None and found[2].is_open


def answer(
    question: Question, attempts: Sequence[Attempt], from_step: int, why_not: str | None = None
) -> Replay:
    """`why_not`: why there was no attempt (more)."""
    whole = [attempt for attempt in attempts if attempt.why_not is None]
    replayed = Replay(
        to_step=question.to_step,
        suspects=question.suspects,
        from_step=from_step,
        times=len(whole),
    )
    if not whole:
        failed = next((attempt.why_not for attempt in attempts), None)
        return replace(replayed, said=f"not replayed: {failed or why_not}")
    shown = [each.disagreement for each in whole if each.disagreement is not None]
    replayed = replace(replayed, disagreement=shown[-1] if shown else None)
    varying = _varying(question, _first_wrong(whole))
    if _is_of_software(question, varying):
        return _of_software(question, varying, replayed)
    if varying:
        return _of_doubt(question, varying, whole, replayed)
    cut_off = next((each.why_not for each in attempts if each.why_not), None)
    then = f"; then {cut_off}" if cut_off else ""
    settle = _of_suspect if question.is_named else _of_two
    return settle(question, whole, replayed, then)


def _first_wrong(attempts: Sequence[Attempt]) -> dict[str, Disagreement]:
    return {name: at for each in reversed(attempts) for name, at in each.wrong.items()}


def _varying(question: Question, wrong: Mapping[str, Disagreement]) -> dict[str, Disagreement]:
    """Of those that should have given the bits of the run: where they did not."""
    names = question.healthy if question.is_named else question.suspects
    varying = {name: wrong[name] for name in names if name in wrong}
    return varying if question.is_named or len(varying) > 1 else {}


def _is_of_software(question: Question, varying: Mapping[str, Disagreement]) -> bool:
    return len(varying) > 1 or (question.of_command and bool(varying))


def _tally(question: Question, attempts: Sequence[Attempt]) -> Tally:
    """The record of a healthy worker is one pass."""
    (worker,), healthy = question.suspects, question.healthy
    right = sum(name in each.right for each in attempts for name in healthy) + len(healthy)
    wrong = sum(worker in each.wrong for each in attempts)
    return Tally(wrong, len(attempts), right, len(healthy))


def _odd_of_two(question: Question, attempts: Sequence[Attempt]) -> tuple[str, str, Tally] | None:
    """Of two that differ the one that is alone: it gave other bits than in the run, and the other
    one never did; it is wrong where they differ again. None: both gave their own bits."""
    varying = {name for each in attempts for name in each.wrong}
    odd = [name for name in question.suspects if name in varying]
    if len(odd) != 1:
        return None
    other = next(name for name in question.suspects if name not in odd)
    wrong = sum(each.disagreement is not None or odd[0] not in each.finished for each in attempts)
    right = sum(other in each.right for each in attempts) + 1
    return odd[0], other, Tally(wrong, len(attempts), right, num_healthy=1)


def _of_software(
    question: Question, varying: Mapping[str, Disagreement], replayed: Replay
) -> Replay:
    first, at = next(iter(varying.items()))
    what = "an operation of the command varies" if question.of_command else "kernels vary"
    gave = f"gave other bits than in the run ({first}: step {at.step}, {at.place})"
    if at.quantity == CALLS:
        gave = f"differ (their models, called several times behind step {at.step})"
    who = listed(list(varying))
    said = f"computed again, {who} {gave}: {what}, so no difference proves anything"
    return replace(replayed, is_software=True, said=said)


def _of_doubt(
    question: Question,
    varying: Mapping[str, Disagreement],
    attempts: Sequence[Attempt],
    replayed: Replay,
) -> Replay:
    (healthy, at), tally = next(iter(varying.items())), _tally(question, attempts)
    replayed = replace(replayed, wrong=tally.wrong, doubted=healthy)
    said = (
        f"computed again, {question.suspects[0]} was wrong in {replayed.how_often}, and "
        f"{healthy} gave other bits than in the run, too (step {at.step}, {at.place}): nothing "
        "tells which of them is at fault"
    )
    return replace(replayed, said=said)


def _of_suspect(
    question: Question, attempts: Sequence[Attempt], replayed: Replay, then: str
) -> Replay:
    (worker,), tally = question.suspects, _tally(question, attempts)
    times = {1: "once", 2: "twice"}.get(tally.times, f"{tally.times} times")
    replayed_so = f"replayed {times} ({question.what(replayed.from_step)})"
    if (early := _early(worker, question, attempts)) is not None:
        said = f"{worker} gave other bits than in the run (step {early.step}, {early.place}), and "
        said += "nothing tells which are right"
        return replace(replayed, said=f"{replayed_so}: {said}{then}")
    replayed = replace(replayed, repeats={worker: _repeat(tally)}, wrong=tally.wrong)
    if question.trial and tally.convicts:  # of two, too
        replayed = replace(replayed, odd=worker)
    said = f"{replayed_so}: {worker} {_how(tally, replayed, question)}{then}"
    return replace(replayed, said=said)


def _repeat(tally: Tally) -> Repeat:
    if tally.wrong == 0:
        return Repeat.TRANSIENT
    if not tally.convicts:
        return Repeat.UNSETTLED
    return Repeat.PERSISTENT if tally.wrong == tally.times else Repeat.INTERMITTENT


def _how(tally: Tally, replayed: Replay, question: Question) -> str:
    if tally.wrong == 0:
        return "gave the right bits" if question.healthy else "stayed as it was"
    found = replayed.disagreement
    where = f", first in {found.place}" if found is not None and found.tensor else ""
    again = f"was wrong again in {replayed.how_often}{where}"
    if not question.healthy:
        return f"{again}, and no healthy worker beside it tells whether its device is at fault"
    were = "was" if len(question.healthy) == 1 else "were"
    proof = "" if tally.convicts else ", which is not proof yet"
    return f"{again}; {listed(list(question.healthy))} never {were}{proof}"


def _early(worker: str, question: Question, attempts: Sequence[Attempt]) -> Disagreement | None:
    """Where a worker that is alone gave other bits before its state had changed: nothing tells
    which were right."""
    if question.healthy:
        return None
    places = (attempt.wrong.get(worker) for attempt in attempts)
    return next((at for at in places if at is not None and at.step <= question.sound_to), None)


def _of_two(question: Question, attempts: Sequence[Attempt], replayed: Replay, then: str) -> Replay:
    """Two that differ, and no majority: their replays may tell whose bits were right."""
    if (found := _odd_of_two(question, attempts)) is None:
        if replayed.disagreement is None:
            repeat = Repeat.TRANSIENT
            what = "they agree now, and nothing tells whose bits were wrong"
        else:
            repeat = Repeat.UNSETTLED
            what = f"{listed(list(question.suspects))} gave their own bits again"
        both = dict.fromkeys(question.suspects, repeat)
        return replace(replayed, repeats=both, said=f"replayed: {what}{then}")
    odd, other, tally = found
    repeat = _repeat(tally)
    repeats = {odd: repeat} if tally.convicts else dict.fromkeys(question.suspects, repeat)
    replayed = replace(replayed, odd=odd, repeats=repeats, wrong=tally.wrong)
    so = (
        f"gave other ones, wrong in {replayed.how_often}"
        if tally.wrong
        else f"gave those of {other}"
    )
    said = f"replayed: {other} gave its bits again, and {odd} {so}{then}"
    return replace(replayed, said=said)
