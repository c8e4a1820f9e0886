"""Identical runs must give identical bits. Compares them step by step; pure over step events.

Workers are compared inside groups: two GPUs of different models may rightly round differently
(cuBLAS promises equal bits only for one architecture and one count of multiprocessors).
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from model_check.events import Step

QUANTITIES = ("loss", "grad_norm")
PATIENCE_NS = 60 * 10**9
"""How long the rest of a group may take, after a difference was seen, to show which is odd."""


class Disagreement(Struct, frozen=True):
    """The first step at which the bits of one group differ."""

    step: int
    quantity: str
    """`loss` or `grad_norm`."""
    bits: Mapping[str, str]
    """Worker -> exact value, as `float.hex()`."""

    @property
    def odd(self) -> tuple[str, ...]:
        """The workers that differ from a strict majority; none when no value has one."""
        value, votes = Counter(self.bits.values()).most_common(1)[0]
        if votes * 2 <= len(self.bits):
            return ()
        return tuple(worker for worker, bits in self.bits.items() if bits != value)

    def __str__(self) -> str:
        values = ", ".join(
            f"{worker} {float.fromhex(bits):.9g} ({bits})" for worker, bits in self.bits.items()
        )
        odd = " and ".join(self.odd) + (" differs" if len(self.odd) == 1 else " differ")
        if not self.odd:
            odd = "workers differ, and no majority tells which is right"
        return f"step {self.step}: {odd} in the {self.quantity.replace('_', ' ')}: {values}"


class Agreement:
    """Holds a step until its whole group has reported it: memory grows with the stragglers only.

    A group that differs gets a minute for its stragglers to show which worker is odd. A worker that
    never reports (it hangs, it was killed) does not hide the difference of the others.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        """`groups`: worker -> the group whose members must agree."""
        self._groups = groups
        self._sizes = Counter(groups.values())
        self.agreed_steps = {w: 0 for w, group in groups.items() if self._sizes[group] > 1}
        """Worker -> steps at which it agreed with its equals; without equals it has no entry."""
        self._waiting: dict[tuple[str, int], dict[str, Step]] = {}
        self._doubts: dict[str, tuple[int, int]] = {}
        """Group -> (the first step that differs among the reports so far, time of that report)."""

    def record(self, worker: str, step: Step) -> Disagreement | None:
        """Take one worker's step; the disagreement that it completes, if any."""
        group = self._groups[worker]
        reported = self._waiting.setdefault((group, step.step), {})
        reported[worker] = step
        if len(reported) < self._sizes[group]:
            return self._overdue(group, step)
        difference = _compare(step.step, reported)
        if difference is None:
            del self._waiting[group, step.step]
            for name in reported.keys() & self.agreed_steps.keys():
                self.agreed_steps[name] += 1
        return difference

    def unsettled(self) -> Disagreement | None:
        """For the end of a run: the first difference among reports whose group was never
        complete."""
        for (_, number), reported in sorted(self._waiting.items(), key=lambda item: item[0][1]):
            if (difference := _compare(number, reported)) is not None:
                return difference
        return None

    def _overdue(self, group: str, newest: Step) -> Disagreement | None:
        if group not in self._doubts:
            if _compare(newest.step, self._waiting[group, newest.step]) is not None:
                self._doubts[group] = (newest.step, newest.t)
            return None
        number, since_ns = self._doubts[group]
        if newest.t - since_ns < PATIENCE_NS:
            return None
        return _compare(number, self._waiting[group, number])


def _compare(number: int, reported: Mapping[str, Step]) -> Disagreement | None:
    for quantity in QUANTITIES:
        bits = {name: getattr(event, quantity) for name, event in sorted(reported.items())}
        if len(set(bits.values())) > 1:
            return Disagreement(number, quantity, bits)
    return None
