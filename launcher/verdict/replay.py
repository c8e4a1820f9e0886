"""What it means that the steps to a difference, computed again, differ again or not. Pure.

A fault that comes again with the same bits, twice, is the device's. A kernel that varies by itself
with probability p in a step gives the same wrong bits in the same step again with p at most, twice
with p * p; other wrong bits must come NUM_OF_OTHER_BITS times in a row, beside a healthy worker
that never strays from its own record.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from launcher.verdict.agreement import compare
from launcher.verdict.disagreement import Disagreement, Replay
from launcher.verdict.live import Watch
from launcher.verdict.observer import NEVER, Observer
from launcher.verdict.record import RunEnd, Stop
from launcher.verdict.severity import Repeat
from model_check.errors import EXIT_HANG, EXIT_USAGE
from model_check.events import Break, Command, Event, Step
from model_check.utils.words import listed

NUM_OF_SAME_BITS = 2
NUM_OF_OTHER_BITS = 4
Record = Mapping[int, Step]
"""Step -> what a worker told of it."""


class Question(Struct, frozen=True):
    """What a replay is to answer."""

    to_step: int
    """The step of the fault."""
    suspects: tuple[str, ...]
    """The workers that are named; where nobody is, two that differ."""
    healthy: str | None = None
    """One that computes beside them. None: there is none, or nobody is named."""
    is_named: bool = True
    sound_to: int = -1
    """After this step the state of a suspect that is alone was as it had to be."""

    @property
    def workers(self) -> tuple[str, ...]:
        return self.suspects if self.healthy is None else (*self.suspects, self.healthy)


class Attempt(Struct, frozen=True, kw_only=True):
    """The steps, computed again once."""

    strayed: Mapping[str, Disagreement] = {}
    """Worker -> where it first gave other bits than in the run."""
    again: tuple[str, ...] = ()
    """The suspects that differ from the healthy worker, or whose state changed by itself."""
    disagreement: Disagreement | None = None
    why_not: str | None = None
    """Why it came to no end; None: it did."""


def questions_of(watch: Watch) -> list[Question]:
    """One for each fault of bits, but for validation losses: no step shows them."""
    broken = {name: h.broken for name, h in watch.histories.items() if h.broken}
    found = [each for each in watch.disagreements if " " not in each.quantity]
    questions = [_question_of(each, broken, watch) for each in found]
    asked = {name for question in questions for name in question.suspects}
    for name, change in broken.items():
        if name not in asked:
            healthy = _healthy(watch, [*broken, *asked], name)
            sound_to = -1 if change.since is None else change.since
            questions.append(Question(change.step, (name,), healthy, sound_to=sound_to))
    return questions


def _question_of(found: Disagreement, broken: Mapping[str, Break], watch: Watch) -> Question:
    if not found.odd:
        return Question(found.step, _two_that_differ(found), is_named=False)
    steps = [broken[name].step for name in found.odd if name in broken]
    others = [name for each in watch.disagreements for name in each.odd]
    healthy = _healthy(watch, [*broken, *others], found.odd[0])
    return Question(max([found.step, *steps]), found.odd, healthy)


def question_about(worker: str, watch: Watch) -> Question | None:
    """To the last step of a worker that nobody named; None: it told none."""
    last = watch.histories[worker].last_step
    if last is None:
        return None
    return Question(last, (worker,), _healthy(watch, (worker,), worker), sound_to=last)


def _healthy(watch: Watch, suspects: Collection[str], worker: str) -> str | None:
    """The equal of `worker` that came furthest, of those against whom nothing is known."""
    equals = [name for name in watch.agreement.equals(worker) if name not in suspects]
    finite = [name for name in equals if watch.histories[name].nonfinite is None]
    came = [(watch.histories[name].num_steps, name) for name in finite]
    most = max((steps for steps, _ in came), default=0)
    return next((name for steps, name in came if steps == most > 0), None)


def _two_that_differ(found: Disagreement) -> tuple[str, ...]:
    first: dict[str, str] = {}
    for worker, bits in found.bits.items():
        first.setdefault(bits, worker)
    return tuple(first.values())[:2]


class ReplayWatch(Observer):
    """Holds the replays against each other, and each against what its worker told in the run."""

    def __init__(
        self,
        question: Question,
        records: Mapping[str, Record],
        broken: Mapping[str, Break],
        limit_s: float,
    ) -> None:
        """`broken`: what changed by itself in the run. `limit_s`: how long this attempt may
        take."""
        self._question, self._records, self._limit_s = question, records, limit_s
        self._broken = broken
        self._watch = Watch(dict.fromkeys(question.workers, "replay"), max_lead=1)
        self._strayed: dict[str, Disagreement] = {}
        self._until = NEVER

    @property
    def due(self) -> float:
        return min(self._until, self._watch.due)

    def on_event(self, worker: str, event: Event) -> Stop | None:
        stop = self._watch.on_event(worker, event)
        if isinstance(event, Step) and event.step in self._records[worker]:
            self._hold_against_record(worker, event)
        if self._question.healthy in self._strayed:
            text = f"replay: {self._question.healthy} gave other bits than in the run"
            return Stop(text, EXIT_USAGE)
        return stop and replace(stop, reason="replay: the difference came again", culprits=())

    def on_end(self, worker: str) -> None:
        self._watch.on_end(worker)

    def tick(self, now: float) -> Stop | None:
        self._until = min(self._until, now + self._limit_s)
        if now >= self._until:
            return Stop(f"the replay took longer than {self._limit_s:.0f} s", EXIT_HANG)
        stop = self._watch.tick(now)
        return stop and replace(stop, reason="replay: the difference came again", culprits=())

    def commands(self) -> list[tuple[str, Command]]:
        return self._watch.commands()

    def attempt(self, end: RunEnd) -> Attempt:
        """`end`: how the run of the replays ended."""
        histories, found = self._watch.histories, next(iter(self._watch.disagreements), None)
        alone = {name for name, h in histories.items() if h.broken or h.repeated is False}
        again = {*alone, *(self._differing(found) if found else ())}
        have_come = all(h.num_steps and h.is_finished for h in histories.values())
        is_whole = bool(again or have_come or self._question.healthy in self._strayed)
        return Attempt(
            strayed=self._strayed | dict(self._changed_elsewhere()),
            again=tuple(name for name in self._question.suspects if name in again),
            disagreement=found,
            why_not=None if is_whole else end.reason or "its workers ended early",
        )

    def _hold_against_record(self, worker: str, step: Step) -> None:
        recorded = self._records[worker][step.step]
        found = compare({"the run": recorded, "the replay": step})
        if step.repeated is False:
            found = found or Disagreement(step.step, "passes of its first step", {})
        if found is not None:
            self._strayed.setdefault(worker, found)

    def _differing(self, found: Disagreement) -> set[str]:
        """From the healthy worker; where there is none, all that differ."""
        right = None if self._question.healthy is None else found.bits[self._question.healthy]
        return {name for name, bits in found.bits.items() if bits != right}

    def _changed_elsewhere(self) -> Iterator[tuple[str, Disagreement]]:
        """State that changed by itself again, but at another place."""
        for name, history in self._watch.histories.items():
            now, before = history.broken, self._broken.get(name)
            if now and before and replace(now, t=0) != replace(before, t=0):
                yield name, Disagreement(now.step, now.what, {})


def is_open(question: Question, attempts: Sequence[Attempt]) -> bool:
    """Whether the steps must be computed once more before anybody is named for good."""
    last = attempts[-1]
    if last.why_not or question.healthy in last.strayed or not question.is_named:
        return False
    return any(_needs(name, attempts) > len(attempts) for name in _always(question, attempts))


def answer(
    question: Question, attempts: Sequence[Attempt], from_step: int, why_not: str | None = None
) -> Replay:
    """`why_not`: why there was no attempt (more)."""
    whole = [attempt for attempt in attempts if attempt.why_not is None]
    replayed = Replay(to_step=question.to_step, from_step=from_step, times=len(whole))
    if not whole:
        failed = next((attempt.why_not for attempt in attempts), None)
        return replace(replayed, said=f"not replayed: {failed or why_not}")
    replayed = replace(replayed, disagreement=whole[-1].disagreement)
    if not question.is_named:
        return _of_two(question, whole[-1], replayed)
    if question.healthy is not None and question.healthy in whole[-1].strayed:
        return _of_software(question.healthy, whole[-1], replayed)
    return _of_suspects(question, whole, replayed)


def _always(question: Question, attempts: Sequence[Attempt]) -> list[str]:
    """The suspects that differed each time."""
    return [name for name in question.suspects if all(name in each.again for each in attempts)]


def _needs(worker: str, attempts: Sequence[Attempt]) -> int:
    """How often its fault must come for it to be named for good."""
    has_same_bits = not any(worker in attempt.strayed for attempt in attempts)
    return NUM_OF_SAME_BITS if has_same_bits else NUM_OF_OTHER_BITS


def _of_software(healthy: str, attempt: Attempt, replayed: Replay) -> Replay:
    at = attempt.strayed[healthy]
    said = (
        f"computed again, {healthy} gave other bits than in the run (step {at.step}, {at.place}): "
        "its kernels vary, so no difference proves anything"
    )
    return replace(replayed, is_software=True, said=said)


def _of_suspects(question: Question, attempts: Sequence[Attempt], replayed: Replay) -> Replay:
    repeats = {name: _repeat(name, question, attempts) for name in question.suspects}
    known = {name: repeat for name, repeat in repeats.items() if repeat is not None}
    clauses = [_clause(name, question, attempts) for name in question.suspects]
    times = {1: "once", 2: "twice"}.get(len(attempts), f"{len(attempts)} times")
    steps = f"steps {replayed.from_step} to {replayed.to_step}"
    said = f"replayed {times} ({steps}): {'; '.join(clauses)}"
    return replace(replayed, repeats=known, said=said)


def _repeat(worker: str, question: Question, attempts: Sequence[Attempt]) -> Repeat | None:
    if _strayed_early(worker, question, attempts) is not None:
        return None
    if worker not in _always(question, attempts):
        return Repeat.TRANSIENT
    has_same_bits = _needs(worker, attempts) == NUM_OF_SAME_BITS
    # Where the time was too short for a second attempt, the same bits once must do.
    is_sure = has_same_bits or len(attempts) >= NUM_OF_OTHER_BITS
    return Repeat.PERSISTENT if is_sure else Repeat.TRANSIENT


def _strayed_early(
    worker: str, question: Question, attempts: Sequence[Attempt]
) -> Disagreement | None:
    """Where a worker that is alone gave other bits before its state had changed: nothing tells
    which were right."""
    if question.healthy is not None:
        return None
    places = (attempt.strayed.get(worker) for attempt in attempts)
    return next((at for at in places if at is not None and at.step <= question.sound_to), None)


def _clause(worker: str, question: Question, attempts: Sequence[Attempt]) -> str:
    if (early := _strayed_early(worker, question, attempts)) is not None:
        where = f"step {early.step}, {early.place}"
        return (
            f"{worker} gave other bits than in the run ({where}), and nothing tells which are right"
        )
    if worker not in _always(question, attempts):
        return f"{worker} gave the right bits" if question.healthy else f"{worker} stayed as it was"
    found = attempts[-1].disagreement
    where = f", first in {found.place}" if found is not None and found.tensor else ""
    if _needs(worker, attempts) == NUM_OF_SAME_BITS:
        return f"{worker} gave the same wrong bits again{where}"
    return f"{worker} was wrong again, with other bits{where}"


def _of_two(question: Question, attempt: Attempt, replayed: Replay) -> Replay:
    """Two that differ, and no majority: their replays may tell whose bits were right."""
    first, second = question.suspects
    strayed = [name for name in question.suspects if name in attempt.strayed]
    if len(strayed) == len(question.suspects):
        return _of_software(first, attempt, replayed)
    if not attempt.again and strayed:
        (odd,) = strayed
        other = second if odd == first else first
        said = f"replayed: {other} gave its bits again, and {odd} gave those of {other}"
        return replace(replayed, repeats=_both(question, Repeat.TRANSIENT), said=said)
    if attempt.again and not strayed:
        said = f"replayed: {listed(question.suspects)} gave their own bits again"
        return replace(replayed, repeats=_both(question, Repeat.PERSISTENT), said=said)
    return replace(replayed, said="replayed: they differ again, in another way")


def _both(question: Question, repeat: Repeat) -> dict[str, Repeat]:
    return dict.fromkeys(question.suspects, repeat)
