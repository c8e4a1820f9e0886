"""Workers of one group, in many runs: who gave other bits, from which step on. Pure, but for the
events that it asks for.

Each device has one vote, in however many runs it was: a GPU that ran a hundred times does not
outvote ninety-nine others. A job has one, too: its ranks sum what they computed.

Traces are compared; where they differ, events are asked for of one worker of each that are equal.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.verdict.agreement import compare
from launcher.verdict.alone import is_majority
from launcher.verdict.disagreement import Disagreement, explain
from launcher.verdict.fleet import Compared, OddBits, Place
from launcher.verdict.trace import Trace, Tracer
from model_check.events import Evaluation, Event, Step, Vectors

MAJORITY, ANOTHER, WORKER = "majority", "another worker", "this worker"
"""What the sides of a difference are called: `ANOTHER` where there is no majority."""
OTHER_PRINTS = "it told other fingerprints"
_MAX_READ = 300
"""Files of events that are read: about a second. Where more workers differ, the links of their
traces tell between which steps it was."""
_MAX_KEPT = 4
"""Workers whose chains stay in memory."""
Load = Callable[[Place], Iterable[Event]]


class Member(Struct, frozen=True):
    """A worker of the group."""

    place: Place
    device: str
    voter: str
    """What has one vote: the device; of a job, its devices together."""
    attempt: str
    """The run; of a job of several nodes the same for all of its parts."""
    first_step: int
    trace: Trace


class _Told(Struct):
    """What a worker told of one step; a run may have a million."""

    step: Step | None = None
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    """By their split; they come before the step of their number."""
    vectors: Vectors | None = None


class _Class(Struct, eq=False):
    """Members that are equal, as far as each of them came; the first came farthest."""

    members: list[Member]

    @property
    def first(self) -> Member:
        return self.members[0]

    @property
    def voters(self) -> set[str]:
        return {member.voter for member in self.members}

    def voters_at(self, at: int) -> set[str]:
        """Those that told the step of this index, or the evaluations behind the last."""
        return {member.voter for member in self.members if _reaches(member.trace, at)}


class _Parting(NamedTuple):
    """Where a chain parts from the reference: at the step of index `at`, from the first that both
    told; the number of steps where what differs is an evaluation behind the last. It may be an
    earlier step, from `since` on, where events are gone."""

    since: int
    at: int
    bits: str
    """What tells those apart that part there."""

    @property
    def is_exact(self) -> bool:
        return self.since == self.at


class _Votes(NamedTuple):
    """Where a chain parts."""

    own: set[str]
    """Those for its bits."""
    right: set[str]
    """The majority; empty: there is none."""


class Comparison:
    """Of the members of one group."""

    def __init__(self, members: Sequence[Member], load: Load) -> None:
        """`load`: the events of a worker; none where they are gone."""
        self._is_one = len({member.voter for member in members}) == 1
        # One device, or job, in several runs: each run has a vote.
        self._members = [_by_attempt(member) if self._is_one else member for member in members]
        self._load = load
        self._num_read = 0
        self._chains: dict[Place, list[str]] = {}
        self._partings: dict[tuple[_Class, _Class], _Parting] = {}

    def run(self) -> Compared:
        found, classes = Compared(), self._classes()
        while len(classes) > 1:
            since, odd = self._settle_first(classes, found)
            if odd:
                classes = [each for each in classes if each not in odd]
            else:
                classes = _that_ended_before(classes, since)
        if classes and len(classes[0].voters) > 1:
            found.cleared |= {member.place for member in classes[0].members}
        if classes and len(classes[0].members) > 1:
            found.equal |= {member.place for member in classes[0].members}
        return found

    def _classes(self) -> list[_Class]:
        """The longest first. Members that stopped early belong to one that was equal so far."""
        same: dict[tuple[int, str], list[Member]] = {}
        for member in sorted(self._members, key=lambda each: (-each.trace.steps, each.place)):
            same.setdefault((member.trace.steps, member.trace.bits), []).append(member)
        classes: list[_Class] = []
        for (steps, _), members in same.items():
            longer = (each for each in classes if each.first.trace.steps > steps)
            fits = [each for each in longer if self._continues(each.first, members[0])]
            if fits:
                max(fits, key=lambda each: len(each.voters)).members += members
            else:
                classes += _by_evaluations(members)
        return classes

    def _continues(self, long: Member, short: Member) -> bool:
        """Whether the longer one had the bits of the shorter at its end."""
        steps = short.trace.steps
        if (bits := long.trace.after(steps)) is not None:
            return bits == short.trace.bits
        if _known(short.trace, long.trace)[1] is not None:
            return False
        chain = self._chain(long)
        # Without the events: equal, as far as both are known.
        return len(chain) < steps or chain[steps - 1] == short.trace.bits

    def _settle_first(self, classes: Sequence[_Class], found: Compared) -> tuple[int, set[_Class]]:
        """Of the first step that differs: who is odd goes into `found`. Returns the index of
        the first step in which it may be, and those that are out of the comparison; none: there is
        no majority, so nobody can say who is right."""
        reference = max(classes, key=lambda each: (len(each.voters), each.first.trace.steps))
        partings = {e: self._parting(reference, e) for e in classes if e is not reference}
        at = min(parting.at for parting in partings.values())
        since = min(parting.since for parting in partings.values())
        sides: dict[str, list[_Class]] = {"": [reference]}
        unsure: set[str] = set()
        for each, parting in partings.items():
            if parting.since <= at < parting.at:
                # Its events are gone: it may have parted here. A vote for nobody.
                unsure |= each.voters_at(at)
            else:
                sides.setdefault(parting.bits if parting.at == at else "", []).append(each)
        votes = {b: set().union(*(e.voters_at(at) for e in side)) for b, side in sides.items()}
        num = len(unsure.union(*votes.values()))
        most = [bits for bits, voters in votes.items() if is_majority(len(voters), num)]
        right = sides[most[0]] if len(most) == 1 else None
        for_right = set() if right is None else votes[most[0]]
        some = next(parting for parting in partings.values() if parting.at == at)
        for bits, side in sides.items():
            if side is right:
                continue
            beside = right or next(other for other in sides.values() if other is not side)
            for each in side:
                parting = partings.get(each, some) if bits else some
                self._tell(each, beside[0], parting, _Votes(votes[bits], for_right), found)
        if right is None:
            return since, set()
        return since, {each for side in sides.values() for each in side if side is not right}

    def _parting(self, one: _Class, other: _Class) -> _Parting:
        """Of two that differ."""
        if (one, other) not in self._partings:
            self._partings[one, other] = self._found_parting(one.first, other.first)
        return self._partings[one, other]

    def _found_parting(self, one: Member, other: Member) -> _Parting:
        shorter = min(one.trace.steps, other.trace.steps)
        equal, differs = _known(one.trace, other.trace)
        if equal == shorter:
            return _Parting(shorter, shorter, other.trace.evaluations or "-")
        last = (shorter if differs is None else differs) - 1
        mine, others = self._chain(one), self._chain(other)
        for at in range(equal, last + 1 if mine and others else equal):
            if mine[at] != others[at]:
                return _Parting(at, at, others[at])
        return _Parting(equal, last, other.trace.after(last + 1) or str(other.place))

    def _tell(
        self,
        each: _Class,
        beside: _Class,
        parting: _Parting,
        votes: "_Votes",
        found: Compared,
    ) -> None:
        first_step = each.first.first_step
        since, step = first_step + parting.since, first_step + parting.at
        difference = None
        if parting.is_exact:
            name = MAJORITY if votes.right else ANOTHER
            sides = self._told(each.first, parting.at), self._told(beside.first, parting.at)
            difference = _difference(*sides, name)
            if difference is None and all(told.step is not None for told in sides):
                why = f"{OTHER_PRINTS} at step {step}"
                found.unlike |= {member.place: why for member in each.members}
                return
        where = f"step {step}" if parting.is_exact else f"steps {since} to {step}"
        odd = OddBits(
            step=step,
            where=where,
            difference=difference,
            num_right=len(votes.right - votes.own),
            is_alone=False,
            is_shared=bool(votes.right) and len(votes.own) > 1 and not self._is_one,
        )
        # Nothing is known against those that ended before.
        for member in each.members:
            if _reaches(member.trace, parting.at):
                is_alone = member.voter in votes.right
                found.odd[member.place] = replace(odd, is_alone=is_alone)

    def _chain(self, member: Member) -> list[str]:
        """After each of its steps. It must be that of the trace, which its report has: events that
        are torn, or of another run, count as none."""
        if (chain := self._chains.pop(member.place, None)) is None:
            tracer, chain = Tracer(), []
            for event in self._events(member):
                tracer.record(event)
                if isinstance(event, Step):
                    chain.append(tracer.bits)
            chain = chain if chain[-1:] == [member.trace.bits] else []
        self._chains[member.place] = chain  # the latest that was asked for is the last
        while len(self._chains) > _MAX_KEPT:
            del self._chains[next(iter(self._chains))]
        return chain

    def _told(self, member: Member, at: int) -> _Told:
        """Of the step of this index; nothing where the events are gone."""
        told, number = _Told(), member.first_step + at
        if not self._chain(member):
            return told
        for event in self._events(member):
            match event:
                case Step(step=step) if step == number:
                    told.step = event
                case Evaluation(step=step) if step == number:
                    told.evaluations[event.split] = event
                case Vectors(step=step) if step == number:
                    told.vectors = event
        return told

    def _events(self, member: Member) -> Iterable[Event]:
        self._num_read += 1
        return self._load(member.place) if self._num_read <= _MAX_READ else ()


def _that_ended_before(classes: Sequence[_Class], at: int) -> list[_Class]:
    """Those that are equal, since nobody differs before the step of this index."""
    members = [m for each in classes for m in each.members if not _reaches(m.trace, at)]
    return [_Class(members)] if members else []


def _by_attempt(member: Member) -> Member:
    return replace(member, voter=member.attempt)


def _reaches(trace: Trace, at: int) -> bool:
    return trace.steps > at or (trace.steps == at and trace.evaluations is not None)


def _by_evaluations(members: Sequence[Member]) -> Iterator[_Class]:
    """Of equal steps: one for each that was told behind the last, and those that ended before."""
    classes: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda each: each.trace.evaluations is None):
        told = member.trace.evaluations or next(iter(classes), "")
        classes.setdefault(told, []).append(member)
    return (_Class(each) for each in classes.values())


def _known(one: Trace, other: Trace) -> tuple[int, int | None]:
    """(steps after which both are known to be equal, steps after which they are known to differ)"""
    equal = 0
    for steps in sorted({*one.kept(), *other.kept()}):
        mine, others = one.after(steps), other.after(steps)
        if mine is None or others is None:
            continue
        if mine != others:
            return equal, steps
        equal = steps
    return equal, None


def _difference(mine: _Told, others: _Told, name: str) -> Disagreement | None:
    """Which quantity, and the tensor where both told the fingerprints of that step; None: the
    events are gone, or they tell no difference of what both have."""
    for right, wrong in _pairs(mine, others):
        if (found := compare({name: right, WORKER: wrong})) is not None:
            vectors = {name: others.vectors, WORKER: mine.vectors}
            return explain(found, {n: v for n, v in vectors.items() if v is not None})
    return None


def _pairs(mine: _Told, others: _Told) -> Iterator[tuple[Step | Evaluation, Step | Evaluation]]:
    """(the other's, its own), in the order in which they were told."""
    for split, evaluation in others.evaluations.items():
        if split in mine.evaluations:
            yield evaluation, mine.evaluations[split]
    if mine.step is not None and others.step is not None:
        yield others.step, mine.step
