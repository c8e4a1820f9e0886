"""Identical runs must give identical bits. Compares them step by step; pure over events.

Workers are compared inside groups: two GPUs of different models may rightly round differently
(cuBLAS promises equal bits only for one architecture and one count of multiprocessors).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from msgspec.structs import replace

from launcher.verdict.disagreement import Disagreement, Mismatch, minority
from model_check.events import Evaluation, Scalar, Step
from model_check.utils.fingerprint import QUANTITIES

NEVER = float("inf")
PATIENCE_S = 60.0
"""How long the rest of a group may take, after a difference was seen, to show which is odd."""
DIVIDING = ("device_name", "num_sms", "num_threads", "isa")
"""What a worker says of its device; one that differs in it may rightly round differently. The name
of a MIG slice holds its profile."""
MUST_MATCH = (
    *("torch", "cuda", "cudnn", "attention_backend", "dtype", "deterministic", "settings", "data"),
    "fingerprints",
)
"""What a worker says of the rest: workers that differ in it cannot be compared."""
Event = Step | Evaluation


class Agreement:
    """Holds a step until its whole group has reported it: memory grows with the stragglers only.

    A group that differs gets a minute for its stragglers to show which worker is odd. A worker that
    never reports (it hangs, it was killed) does not hide the difference of the others.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        """`groups`: worker -> the group whose members must agree, as far as it is known before they
        speak for themselves."""
        self._groups = groups
        self._said: dict[str, dict[str, Scalar]] = {}
        self._excluded: set[str] = set()
        self._left: set[str] = set()
        """The workers that have ended."""
        self._agreed = Counter[str]()
        self._waiting: dict[tuple[str, _Place], dict[str, Event]] = {}
        self._doubts: dict[str, tuple[_Place, float]] = {}
        """Group -> the first place that differs among the reports so far, and the time of that
        report, monotonic seconds."""

    @property
    def agreed_steps(self) -> dict[str, int]:
        """Worker -> steps at which it agreed with its equals; without equals it has no entry."""
        return {name: self._agreed[name] for name in self._groups if len(self.equals(name)) > 1}

    def equals(self, worker: str) -> list[str]:
        """The members of its group, itself included: those on devices of its kind."""
        kind = self._kind(worker)
        return [name for name in self._groups if self._kind(name) == kind]

    def identify(self, worker: str, said: Mapping[str, Scalar]) -> Mismatch | None:
        """Take what a worker says of its device, its software, its settings and its data."""
        self._said.setdefault(worker, {}).update(said)
        equals = [name for name in self.equals(worker) if name in self._said]
        for key in MUST_MATCH:
            values = {name: self._said[name][key] for name in equals if key in self._said[name]}
            if len(set(values.values())) > 1:
                return Mismatch(key, values)
        return None

    def record(self, worker: str, event: Event) -> Disagreement | None:
        """Take one worker's step or evaluation; the disagreement that it completes, if any."""
        if worker in self._excluded:
            return None
        self._said.setdefault(worker, {})
        place, group = _place(event), self._groups[worker]
        reported = self._waiting.setdefault((group, place), {})
        reported[worker] = event
        are_known = all(name in self._said for name, g in self._groups.items() if g == group)
        if are_known and self._is_complete(reported, worker):
            return self._settle(group, place, worker)
        if group not in self._doubts and self._compare_equals(reported):
            self._doubts[group] = place, event.t / 1e9
        return None

    def leave(self, worker: str) -> Disagreement | None:
        """This worker has ended: nobody waits for its reports. The first disagreement of those that
        were held for it."""
        self._left.add(worker)
        self._said.setdefault(worker, {})
        group = self._groups[worker]
        places = sorted(place for of_group, place in self._waiting if of_group == group)
        found = (self._settle_all(group, place) for place in places)
        return next(filter(None, found), None)

    def exclude(self, worker: str) -> Disagreement | None:
        """It is out of the comparison, with all that it has reported. As `leave` for the others."""
        self._excluded.add(worker)
        self._doubts.pop(self._groups[worker], None)
        for reported in self._waiting.values():
            reported.pop(worker, None)
        self._waiting = {place: reported for place, reported in self._waiting.items() if reported}
        return self.leave(worker)

    def _settle_all(self, group: str, place: "_Place") -> Disagreement | None:
        """Of the workers of each kind that are still to report, all may have done so by now."""
        reported = self._waiting[group, place]
        for name in list(reported):
            is_due = name in reported and self._is_complete(reported, name)
            if is_due and (found := self._settle(group, place, name)) is not None:
                return found
        return None

    def _is_complete(self, reported: Mapping[str, Event], worker: str) -> bool:
        """Whether all equals of this worker that are still to report have done so."""
        return reported.keys() >= set(self.equals(worker)) - self._left

    def _settle(self, group: str, place: "_Place", worker: str) -> Disagreement | None:
        reported = self._waiting[group, place]
        names = [name for name in self.equals(worker) if name in reported]
        difference = compare({name: reported[name] for name in names})
        if difference is None:
            self._agree(group, place, names)
        return difference

    @property
    def due(self) -> float:
        """When to call `overdue`, monotonic seconds."""
        return min((since + PATIENCE_S for _, since in self._doubts.values()), default=NEVER)

    def overdue(self, now: float) -> Disagreement | None:
        """A difference whose group had its time."""
        for group, (place, since) in self._doubts.items():
            if now >= since + PATIENCE_S:
                return self._compare_equals(self._waiting[group, place])
        return None

    def unsettled(self) -> Disagreement | None:
        """For the end of a run: the first difference among reports whose group was never
        complete."""
        for (_, _), reported in sorted(self._waiting.items(), key=lambda item: item[0][1]):
            if (difference := self._compare_equals(reported)) is not None:
                return difference
        return None

    def _kind(self, worker: str) -> tuple[Scalar, ...]:
        said = self._said.get(worker, {})
        return (self._groups[worker], *(said.get(key) for key in DIVIDING))

    def _agree(self, group: str, place: "_Place", equals: Sequence[str]) -> None:
        reported = self._waiting[group, place]
        for name in equals:
            is_step = isinstance(reported.pop(name), Step)
            self._agreed[name] += is_step and len(equals) > 1
        if not reported:
            del self._waiting[group, place]

    def _compare_equals(self, reported: Mapping[str, Event]) -> Disagreement | None:
        """The first difference between workers of one kind, among those that have reported."""
        names = sorted(reported, key=lambda name: str(self._kind(name)))
        for _, alike in groupby(names, self._kind):
            difference = compare({name: reported[name] for name in sorted(alike)})
            if difference is not None:
                return difference
        return None


_OF_ALL = ("loss", "grad_norms", "grad_norm")
_Place = tuple[int, int, str]
"""Of an event in a run: an evaluation comes before the step of its number."""


def _place(event: Event) -> _Place:
    if isinstance(event, Step):
        return event.step, 1, ""
    return event.step, 0, event.split


def compare(reported: Mapping[str, Event]) -> Disagreement | None:
    """In causal order: the first quantity that differs, and everyone who differs from the majority
    of those that were equal so far in any."""
    found: Disagreement | None = None
    voters = dict(sorted(reported.items()))
    for quantity in _quantities(voters):
        bits = {name: str(_bits(event, quantity)) for name, event in voters.items()}
        if len(set(bits.values())) < 2:
            continue
        odd = minority(bits)
        if found is None:
            found = Disagreement(next(iter(voters.values())).step, quantity, bits)
        else:
            found = replace(found, others=(*found.others, *sorted(odd)))
        if not odd:
            break
        voters = {name: event for name, event in voters.items() if name not in odd}
    return found


def _quantities(reported: Mapping[str, Event]) -> list[str]:
    """Those that all have, causes before effects."""
    event = next(iter(reported.values()))
    if isinstance(event, Evaluation):
        return [f"validation loss of {event.split}"]
    # Of other tensors a roll-up is another one; these three are always of all.
    steps = (event for event in reported.values() if isinstance(event, Step))
    names = QUANTITIES if len({step.taken for step in steps}) == 1 else _OF_ALL
    return [q for q in names if all(_bits(event, q) for event in reported.values())]


def _bits(event: Event, quantity: str) -> str | None:
    if isinstance(event, Evaluation) or quantity == "loss":
        return event.loss
    return event.grad_norm if quantity == "grad_norm" else event.fp.get(quantity)
