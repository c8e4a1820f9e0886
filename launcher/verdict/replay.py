"""What it means that the steps to a difference, computed again, differ again or not. Pure.

A fault that comes again with the same bits, twice, is the device's. A kernel that varies by itself
with probability p in a step gives the same wrong bits in the same step again with p at most, twice
with p * p; other wrong bits must come NUM_OF_OTHER_BITS times in a row, beside a healthy worker
that never strays from its own record: a kernel that varies in a share q of replays does that with
(q * (1 - q))**8, at most 1.5e-5.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from launcher.verdict.agreement import DIVIDING, MUST_MATCH, compare
from launcher.verdict.disagreement import Disagreement, Replay
from launcher.verdict.live import Watch
from launcher.verdict.observer import NEVER, Observer
from launcher.verdict.record import RunEnd, Stop
from launcher.verdict.severity import Repeat
from launcher.verdict.steps import History
from launcher.verdict.trials import outcomes
from model_check.errors import EXIT_HANG, EXIT_USAGE
from model_check.events import Break, Command, Event, Phase, Step
from model_check.utils.fingerprint import BEFORE
from model_check.utils.words import listed

NUM_OF_SAME_BITS = 2
NUM_OF_OTHER_BITS = 8
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
    begin_by: int = 0
    """A state after so many steps, or fewer, is older than the fault."""

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
    odd = {name: each for each in reversed(found) for name in each.odd}
    unnamed = [each for each in found if not each.odd]
    named = dict.fromkeys([*(name for each in found for name in each.odd), *broken])
    return [
        *(Question(each.step, each.two_that_differ, is_named=False) for each in unnamed),
        *(_question_of(name, odd.get(name), broken.get(name), [*named], watch) for name in named),
    ]


def _question_of(
    name: str,
    found: Disagreement | None,
    change: Break | None,
    named: Sequence[str],
    watch: Watch,
) -> Question:
    """Each suspect is asked by itself: what another one does ends no replay of this one."""
    steps = [each.step for each in (found, change) if each is not None]
    sound_to = -1 if change is None or change.since is None else change.since
    begins = [sound_to + 1] if change is not None else []
    begins += [_begin_by(found, watch.histories[name].turn)] if found is not None else []
    return Question(
        to_step=max(steps),
        suspects=(name,),
        healthy=_healthy(watch, named, name),
        sound_to=sound_to,
        begin_by=min(begins),
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
    last = watch.histories[worker].last_step
    if last is None:
        return None
    healthy = _healthy(watch, (worker,), worker)
    return Question(last, (worker,), healthy, sound_to=last, begin_by=last)


def _healthy(watch: Watch, suspects: Collection[str], worker: str) -> str | None:
    """The equal of `worker` that came furthest, of those against whom nothing is known."""
    equals = [name for name in watch.agreement.equals(worker) if name not in suspects]
    finite = [name for name in equals if watch.histories[name].nonfinite is None]
    came = [(watch.histories[name].num_steps, name) for name in finite]
    most = max((steps for steps, _ in came), default=0)
    return next((name for steps, name in came if steps == most > 0), None)


class ReplayWatch(Observer):
    """Holds the replays against each other, and each against what its worker told in the run."""

    def __init__(
        self,
        question: Question,
        records: Mapping[str, Record],
        histories: Mapping[str, History],
        limit_s: float,
    ) -> None:
        """`histories`: of the run. `limit_s`: how long this attempt may take."""
        self._question, self._records, self._limit_s = question, records, limit_s
        self._histories = histories
        self._watch = Watch(dict.fromkeys(question.workers, "replay"), max_lead=1)
        self._strayed: dict[str, Disagreement] = {}
        self._incomparable: str | None = None
        """Why these replays tell nothing of the run."""
        self._until = NEVER

    @property
    def due(self) -> float:
        return min(self._until, self._watch.due)

    def on_event(self, worker: str, event: Event) -> Stop | None:
        stop = self._watch.on_event(worker, event)
        if isinstance(event, Phase) and event.name in ("build", "train"):
            self._compare_what_it_is(worker, event)
        if isinstance(event, Step) and event.step in self._records[worker]:
            self._hold_against_record(worker, event)
        if self._incomparable is not None:
            return Stop(f"replay: {self._incomparable}", EXIT_USAGE)
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
        if self._incomparable is not None:
            return Attempt(why_not=self._incomparable)
        return Attempt(
            strayed=self._strayed | dict(self._changed_elsewhere()),
            again=tuple(name for name in self._question.suspects if name in again),
            disagreement=found,
            why_not=None if is_whole else end.reason or "its workers ended early",
        )

    def _compare_what_it_is(self, worker: str, event: Phase) -> None:
        """Its device, software and data, with those of the run."""
        said = self._histories[worker].detail
        for key in (*MUST_MATCH, *DIVIDING):
            was, now = said.get(key), event.detail.get(key)
            if key in said and key in event.detail and was != now:
                self._is_not_comparable(f"{key} {was} in the run, {now} now")
        before, again = outcomes(said), outcomes(event.detail)
        if any(before[trial] != again[trial] for trial in before.keys() & again.keys()):
            self._is_not_comparable(f"trials of {worker}'s kernels went otherwise than in the run")

    def _hold_against_record(self, worker: str, step: Step) -> None:
        recorded = self._records[worker][step.step]
        found = compare({"the run": recorded, "the replay": step})
        is_first = self._watch.histories[worker].num_steps == 1
        is_healthy = worker == self._question.healthy
        if found and is_first and is_healthy and found.quantity.startswith(BEFORE):
            what = found.place.removesuffix(" before the update")
            self._is_not_comparable(f"{worker} began with other {what} than the run")
        if step.repeated is False:
            found = found or Disagreement(step.step, "passes of its first step", {})
        if found is not None:
            self._strayed.setdefault(worker, found)

    def _is_not_comparable(self, why: str) -> None:
        """The first reason stays: a worker may tell more until it is gone."""
        self._incomparable = self._incomparable or f"not comparable: {why}"

    def _differing(self, found: Disagreement) -> set[str]:
        """From the healthy worker; where there is none, all that differ."""
        right = None if self._question.healthy is None else found.bits[self._question.healthy]
        return {name for name, bits in found.bits.items() if bits != right}

    def _changed_elsewhere(self) -> Iterator[tuple[str, Disagreement]]:
        """State that changed by itself again, but at another place."""
        for name, history in self._watch.histories.items():
            now, before = history.broken, self._histories[name].broken
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
    replayed = Replay(
        to_step=question.to_step,
        suspects=question.suspects,
        from_step=from_step,
        times=len(whole),
    )
    if not whole:
        failed = next((attempt.why_not for attempt in attempts), None)
        return replace(replayed, said=f"not replayed: {failed or why_not}")
    replayed = replace(replayed, disagreement=whole[-1].disagreement)
    if not question.is_named:
        return _of_two(question, whole[-1], replayed)
    if question.healthy is not None and question.healthy in whole[-1].strayed:
        return _of_software(question.healthy, whole[-1], replayed)
    return _of_suspects(question, attempts, whole, replayed)


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


def _of_suspects(
    question: Question, attempts: Sequence[Attempt], whole: Sequence[Attempt], replayed: Replay
) -> Replay:
    cut_off = next((each.why_not for each in attempts if each.why_not), None)
    repeats = {name: _repeat(name, question, whole, cut_off) for name in question.suspects}
    known = {name: repeat for name, repeat in repeats.items() if repeat is not None}
    clauses = [_clause(name, question, whole) for name in question.suspects]
    clauses += [f"then {cut_off}"] if cut_off else []
    times = {1: "once", 2: "twice"}.get(len(whole), f"{len(whole)} times")
    steps = f"steps {replayed.from_step} to {replayed.to_step}"
    said = f"replayed {times} ({steps}): {'; '.join(clauses)}"
    return replace(replayed, repeats=known, said=said)


def _repeat(
    worker: str, question: Question, attempts: Sequence[Attempt], cut_off: str | None
) -> Repeat | None:
    """None: not known. `cut_off`: why the last attempt came to no end."""
    if _strayed_early(worker, question, attempts) is not None:
        return None
    if worker not in _always(question, attempts):
        return Repeat.TRANSIENT
    needs = _needs(worker, attempts)
    # Where the time was too short for a second attempt, the same bits once must do.
    must_do = needs == NUM_OF_SAME_BITS and cut_off is None
    return Repeat.PERSISTENT if must_do or len(attempts) >= needs else None


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
    missing = NUM_OF_OTHER_BITS - len(attempts)
    proof = f" ({NUM_OF_OTHER_BITS} times in a row would prove it)" if missing > 0 else ""
    return f"{worker} was wrong again, with other bits{where}{proof}"


def _of_two(question: Question, attempt: Attempt, replayed: Replay) -> Replay:
    """Two that differ, and no majority: their replays may tell whose bits were right."""
    first, second = question.suspects
    strayed = [name for name in question.suspects if name in attempt.strayed]
    if len(strayed) == len(question.suspects):
        return _of_software(first, attempt, replayed)
    if strayed and not attempt.again:
        (odd,) = strayed
        other = second if odd == first else first
        said = f"replayed: {other} gave its bits again, and {odd} gave those of {other}"
        return replace(replayed, repeats=_both(question, Repeat.TRANSIENT), said=said)
    if not attempt.again:
        said = "replayed: they agree now, and nothing tells whose bits were wrong"
        return replace(replayed, repeats=_both(question, Repeat.TRANSIENT), said=said)
    if not strayed:
        said = f"replayed: {listed(question.suspects)} gave their own bits again"
        return replace(replayed, repeats=_both(question, Repeat.PERSISTENT), said=said)
    return replace(replayed, said="replayed: they differ again, in another way")


def _both(question: Question, repeat: Repeat) -> dict[str, Repeat]:
    return dict.fromkeys(question.suspects, repeat)
