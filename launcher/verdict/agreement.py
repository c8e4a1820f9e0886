"""Identical runs must give identical bits. Compares them step by step; pure over step events.

Workers are compared inside groups: two GPUs of different models may rightly round differently
(cuBLAS promises equal bits only for one architecture and one count of multiprocessors).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from model_check.events import Step

QUANTITIES = ("loss", "grad_norm")


@dataclass(frozen=True)
class Disagreement:
    """The first step at which the bits of one group differ."""

    step: int
    quantity: str
    """`loss` or `grad_norm`."""
    bits: Mapping[str, str]
    """Worker -> exact value, as `float.hex()`."""

    @property
    def odd(self) -> tuple[str, ...]:
        """Who differs from a strict majority; empty when no value has one."""
        value, votes = Counter(self.bits.values()).most_common(1)[0]
        if votes * 2 <= len(self.bits):
            return ()
        return tuple(worker for worker, bits in self.bits.items() if bits != value)

    def __str__(self) -> str:
        values = ", ".join(
            f"{worker} {float.fromhex(bits):.9g} ({bits})" for worker, bits in self.bits.items()
        )
        who = " and ".join(self.odd) + " differs" if len(self.odd) == 1 else "workers differ"
        if not self.odd:
            who = "workers differ, and no majority tells which is right"
        elif len(self.odd) > 1:
            who = " and ".join(self.odd) + " differ"
        what = self.quantity.replace("_", " ")
        return f"step {self.step}: {who} in the {what}: {values}"


@dataclass
class Agreement:
    """Holds a step until its whole group has reported it: memory grows with the stragglers only."""

    groups: Mapping[str, str]
    """Worker -> the group whose members must agree."""
    agreed_steps: dict[str, int] = field(default_factory=dict)
    """Group -> steps that all of its members agreed on."""
    _waiting: dict[tuple[str, int], dict[str, Step]] = field(default_factory=dict)

    def record(self, worker: str, step: Step) -> Disagreement | None:
        """Take one worker's step; the disagreement that it completes, if any."""
        group = self.groups[worker]
        key = (group, step.step)
        reported = self._waiting.setdefault(key, {})
        reported[worker] = step
        if len(reported) < self.group_size(group):
            return None
        del self._waiting[key]
        for quantity in QUANTITIES:
            bits = {name: getattr(event, quantity) for name, event in sorted(reported.items())}
            if len(set(bits.values())) > 1:
                return Disagreement(step.step, quantity, bits)
        self.agreed_steps[group] = self.agreed_steps.get(group, 0) + 1
        return None

    def group_size(self, group: str) -> int:
        return sum(1 for name in self.groups.values() if name == group)
