"""Identical runs must give identical bits. Compares them step by step; pure over events.

Workers are compared inside groups: two GPUs of different models may rightly round differently
(cuBLAS promises equal bits only for one architecture and one count of multiprocessors).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from msgspec.structs import replace

from launcher.verdict.alone import Standing, who_is_alone
from launcher.verdict.disagreement import EQUAL, REPEATED, VARIED, Disagreement, Dispute, Mismatch
from launcher.verdict.trials import compare_trials, has_failed_one, outcomes
from model_check.events import Evaluation, Phase, Scalar, Step
from model_check.utils.fingerprint import in_order, is_given

NEVER = float("inf")
PATIENCE_S = 60.0
"""How long the rest of a group may take, after a difference was seen, to show which is odd."""
DIVIDING = ("device_name", "num_sms", "num_threads", "isa")
"""What a worker says of its device; one that differs in it may rightly round differently. The name
of a MIG slice holds its profile."""
TAKEN = ("attention_backend", "attention_kernel", "attention_package", "optimizer")
"""Kernels that it took: another one where a trial was failed."""
MUST_MATCH = (
    *("torch", "cuda", "cudnn", "math_environ", *TAKEN, "dtype", "deterministic", "settings"),
    *("parameters", "data", "fingerprints", "compiled"),
)
"""What a worker says of the rest: workers that differ in it cannot be compared."""
CANDIDATES = "attention_candidates"
"""What it might have taken, with the packages' versions. Workers of one run must share it: only
then a trial that one of them fails is no matter of the stack."""
Event = Step | Evaluation
Told = Event | Phase
"""Bits, or the trials of a phase."""


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
        self._last: dict[str, Step] = {}
        """Worker -> the last step at which it agreed with its equals."""
        self.lacking: dict[str, dict[str, None]] = {}
        """Worker -> quantities that its equals told in some step and it did not."""
        self._waiting: dict[tuple[str, _Place], dict[str, Told]] = {}
        self._doubts: dict[str, tuple[_Place, float]] = {}
        """Group -> the first place that differs among the reports so far, and the time of that
        report, monotonic seconds."""

    def knows_equals(self, worker: str) -> bool:
        """Whether all others of its group have told what they are."""
        of = self._groups[worker]
        others = (name for name, group in self._groups.items() if group == of and name != worker)
        return all(name in self._said for name in others)

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
        own = outcomes(self._said[worker])
        for key in (*MUST_MATCH, CANDIDATES):
            values = {
                name: self._said[name][key]
                for name in equals
                if key in self._said[name]
                # What follows from a trial that only some failed: `record` tells of the trial.
                and (key not in TAKEN or outcomes(self._said[name]) == own)
            }
            if len(set(values.values())) > 1:
                return Mismatch(key, values)
        return None

    def record(self, worker: str, event: Told) -> Disagreement | None:
        """Take one worker's step, evaluation or trials; the disagreement that it completes."""
        if worker in self._excluded:
            return None
        self._said.setdefault(worker, {})
        place, group = _place(event), self._groups[worker]
        reported = self._waiting.setdefault((group, place), {})
        reported[worker] = event
        if isinstance(event, Phase) and (found := self._settle_all(group, place)) is not None:
            return found
        if worker in reported and self._are_known(group) and self._is_complete(reported, worker):
            return self._settle(group, place, worker)
        is_doubtful = isinstance(event, Phase) and has_failed_one(event.detail)
        if (
            reported
            and group not in self._doubts
            and (is_doubtful or self._compare_equals(reported))
        ):
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
        if not self._are_known(group):
            return None
        reported = self._waiting[group, place]
        for name in list(reported):
            is_due = name in reported and self._is_complete(reported, name)
            if is_due and (found := self._settle(group, place, name)) is not None:
                return found
        return None

    def _are_known(self, group: str) -> bool:
        """Whether all have told their devices: one that has not may be an equal of any."""
        return all(name in self._said for name, of in self._groups.items() if of == group)

    def _is_complete(self, reported: Mapping[str, Told], worker: str) -> bool:
        """Whether all equals of this worker that are still to report have done so."""
        return reported.keys() >= set(self.equals(worker)) - self._left

    def _settle(self, group: str, place: "_Place", worker: str) -> Disagreement | None:
        reported = self._waiting[group, place]
        names = [name for name in self.equals(worker) if name in reported]
        difference = _compare({name: reported[name] for name in names})
        if difference is None:
            self._agree(group, place, names)
        return difference

    def steps_at(self, found: Disagreement) -> dict[str, Step]:
        """What the workers that differ told of that step."""
        at = (found.step, 1, "")
        told = [each for (_, place), each in self._waiting.items() if place == at]
        steps = {name: event for each in told for name, event in each.items()}
        return {n: s for n, s in steps.items() if n in found.bits and isinstance(s, Step)}

    def steps_before(self, found: Disagreement) -> dict[str, Step]:
        """The step before it, in which they were equal, of those that did one."""
        last = {name: self._last[name] for name in found.bits if name in self._last}
        return {name: step for name, step in last.items() if step.step == found.step - 1}

    @property
    def due(self) -> float:
        """When to call `overdue`, monotonic seconds."""
        return min((since + PATIENCE_S for _, since in self._doubts.values()), default=NEVER)

    def overdue(self, now: float) -> Disagreement | None:
        """A difference whose group had its time."""
        for group, (place, since) in list(self._doubts.items()):
            if now >= since + PATIENCE_S:
                if found := self._compare_equals(self._waiting[group, place]):
                    return found
                del self._doubts[group]  # a failed trial, which no other worker has passed by now
        return None

    @property
    def awaits_trials(self) -> bool:
        """Whether a worker failed the trial of a kernel, and not all equals have told theirs."""
        return any(place < _FIRST for place, _ in self._doubts.values())

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
        for name, quantities in _lacking({name: reported[name] for name in equals}).items():
            self.lacking.setdefault(name, {}).update(dict.fromkeys(quantities))
        for name in equals:
            if isinstance(told := reported.pop(name), Step):
                self._agreed[name] += len(equals) > 1
                self._last[name] = told
        if not reported:
            del self._waiting[group, place]
            if self._doubts.get(group, (None, 0))[0] == place:  # all failed the same trial
                del self._doubts[group]

    def _compare_equals(self, reported: Mapping[str, Told]) -> Disagreement | None:
        """The first difference between workers of one kind, among those that have reported."""
        names = sorted(reported, key=lambda name: str(self._kind(name)))
        for _, alike in groupby(names, self._kind):
            difference = _compare({name: reported[name] for name in sorted(alike)})
            if difference is not None:
                return difference
        return None


NO_LOSS = "none"
"""It told none: another one that does differs from it."""
_OF_ALL = ("loss", "grad_norms", "grad_norm")
_Place = tuple[int, int, str]
"""Of an event in a run: an evaluation comes before the step of its number, trials before all."""
_FIRST: _Place = (0, 0, "")


def _place(event: Told) -> _Place:
    if isinstance(event, Phase):
        return -1, 0, event.name
    if isinstance(event, Step):
        return event.step, 1, ""
    return event.step, 0, event.split


def _compare(reported: Mapping[str, Told]) -> Disagreement | None:
    """Of one place: all are trials, or none is."""
    if trials := {name: each for name, each in reported.items() if isinstance(each, Phase)}:
        return compare_trials(trials)
    return compare({n: each for n, each in reported.items() if not isinstance(each, Phase)})


def compare(reported: Mapping[str, Event]) -> Disagreement | None:
    """In causal order: the first quantity that differs, and everyone who is alone among those that
    were equal so far in any."""
    found: Disagreement | None = None
    voters, varying = dict(sorted(reported.items())), _varying(reported)
    for quantity, names in _comparisons(voters):
        bits = {name: str(_bits(voters[name], quantity)) for name in names if name in voters}
        if len(set(bits.values())) < 2:
            continue
        varied = set() if is_given(quantity) else varying
        passes = {n: (b, f"not {b}") if n in varied else (b,) for n, b in bits.items()}
        answer = who_is_alone(passes)
        odd = answer.workers if answer.standing is Standing.NAMED else ()
        named = odd if varied.intersection(bits) else None
        step = voters[next(iter(bits))].step
        difference = Disagreement(step, quantity, bits, named=named)
        found = difference if found is None else replace(found, others=(*found.others, *odd))
        if not odd:
            is_first = found is difference
            return found if is_first else replace(found, dispute=Dispute(quantity, bits))
        voters = {name: event for name, event in voters.items() if name not in odd}
    return found


def _varying(reported: Mapping[str, Event]) -> set[str]:
    """The workers whose first step gave other bits when it was computed twice."""
    steps = {name: each for name, each in reported.items() if isinstance(each, Step)}
    return {name for name, step in steps.items() if step.repeated is False}


def _comparisons(reported: Mapping[str, Event]) -> list[tuple[str, list[str]]]:
    """Quantities, causes before effects, and who can be compared in each: all that told it, or
    those of them that took it of the same tensors, as ranks do that hold the same shard of a
    model."""
    names, event = list(reported), next(iter(reported.values()))
    if isinstance(event, Evaluation):
        return [(f"validation loss of {event.split}", names)]
    takers: dict[str, list[str]] = {}
    for name, each in reported.items():
        takers.setdefault(each.taken if isinstance(each, Step) else "", []).append(name)
    quantities = in_order(_told(reported))
    found = [(q, who) for q in quantities for who in ([names] if q in _OF_ALL else takers.values())]
    found.append((REPEATED, names))
    told = [(q, [name for name in who if _bits(reported[name], q)]) for q, who in found]
    return [(q, who) for q, who in told if len(who) > 1]


def _told(reported: Mapping[str, Told]) -> Iterator[str]:
    """The quantities that have fingerprints."""
    return (q for each in reported.values() if isinstance(each, Step) for q in each.fp)


def _lacking(reported: Mapping[str, Told]) -> dict[str, list[str]]:
    """Worker -> what others told of the same step and it did not."""
    told = {name: each.fp for name, each in reported.items() if isinstance(each, Step)}
    if all(one.keys() == other.keys() for one, other in pairwise(told.values())):
        return {}
    found = {
        name: [
            q
            for q in in_order(_told(reported))
            if q not in fp and any(q in o for o in told.values())
        ]
        for name, fp in told.items()
    }
    return {name: quantities for name, quantities in found.items() if quantities}


def _bits(event: Event, quantity: str) -> str | None:
    if isinstance(event, Evaluation):
        return event.loss
    if quantity == "loss":
        return event.loss or NO_LOSS
    if quantity == REPEATED:
        return None if event.repeated is None else EQUAL if event.repeated else VARIED
    return event.grad_norm if quantity == "grad_norm" else event.fp.get(quantity)
