"""What the host makes of a run's fingerprints: the roll-ups of each step, the vectors of the last
ones, and whether state stays as the last update left it."""

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from model_check.engine.fingerprints import Entry, Layout, Prints
from model_check.engine.reading import StepMetrics
from model_check.events import Break, Vectors
from model_check.utils.fingerprint import BEFORE, flipped

NUM_KEPT = 8
"""Steps whose vectors stay: more than workers may be apart."""
_NUM_LAYOUTS = 1024
"""A run needs a few for each slot of a rotation."""
_PASSES = ("forward", "backward", "gradients")
"""What depends on weights and data alone."""
_MODULUS = 1 << 64


@dataclass(frozen=True)
class StepPrints:
    """A step's fingerprints, on the host."""

    step: int
    prints: Prints

    @cached_property
    def roll_ups(self) -> dict[str, str]:
        return self.prints.layout.roll_ups(self.prints.values)

    @cached_property
    def values(self) -> dict[Entry, int]:
        """Unsigned, in the order of the entries."""
        numbers = self.prints.values.tolist()
        return dict(zip(self.prints.layout.entries, (n % _MODULUS for n in numbers), strict=True))

    def vectors(self) -> Vectors:
        found: dict[str, dict[str, str]] = {}
        for entry, value in self.values.items():
            found.setdefault(entry.quantity, {})[entry.tensor] = f"{value:016x}"
        sizes = {e.tensor: (e.num_values, e.num_bits) for e in self.values if e.num_bits}
        return Vectors(step=self.step, fp=found, sizes=sizes)

    def of(self, quantities: tuple[str, ...]) -> dict[Entry, int]:
        return {e: value for e, value in self.values.items() if e.quantity in quantities}


class FingerprintLog:
    """Of one worker."""

    def __init__(self) -> None:
        self._kept: deque[StepPrints] = deque(maxlen=NUM_KEPT)
        self._rehearsal: dict[Entry, int] = {}
        self._of_rehearsal: tuple[str, float | None] = "", None
        """Its loss, exact, and the scale of that."""
        self._left: StepPrints | None = None
        """What the last update left is among these."""
        self._left_at: int | None = None
        self.repeated: bool | None = None
        """Whether the latest step, if it is the first, repeats its rehearsal."""

    @property
    def roll_ups(self) -> dict[str, str]:
        """Of the latest step."""
        return self._kept[-1].roll_ups if self._kept else {}

    @property
    def taken(self) -> str:
        """Which tensors the roll-ups cover."""
        return self._kept[-1].prints.taken if self._kept else ""

    def begin(self, prints: Prints, loss: float = 0.0, loss_scale: float | None = None) -> None:
        """The state that the first step begins with, and both its passes, where they were computed
        once before it: they gave this loss, of this rank, at this loss scale."""
        self._left = _on_host(-1, replace(prints, layout=_as_left(prints.layout)))
        self._rehearsal = self._left.of(_PASSES)
        self._of_rehearsal = loss.hex(), loss_scale

    def take(self, metrics: StepMetrics) -> None:
        """A step that was just read."""
        if metrics.prints is None:
            return
        taken = StepPrints(metrics.step, metrics.prints)
        self.repeated = None
        # Where it overflowed it was trained again at a smaller scale.
        loss, scale = self._of_rehearsal
        is_same = self._rehearsal and metrics.loss_scale == scale
        if is_same and self._broken(taken) is None:  # from the same state
            own = metrics.loss if metrics.own_loss is None else metrics.own_loss
            self.repeated = self._rehearsal == taken.of(_PASSES) and own.hex() == loss
        self._rehearsal = {}
        self._kept.append(taken)

    def check(self) -> Break | None:
        """Whether the latest step found its state as the update before had left it."""
        if not self._kept:
            return None
        taken = self._kept[-1]
        found = self._broken(taken)
        self._left, self._left_at = taken, taken.step
        return found

    def check_state(self, prints: Prints) -> Break | None:
        """The same for the state now, behind the latest step."""
        if self._left_at is None:
            return None
        return self._broken(_on_host(self._left_at + 1, prints))

    def vectors(self, step: int) -> Vectors:
        """Without fingerprints where the step is not kept any more."""
        found = next((taken for taken in reversed(self._kept) if taken.step == step), None)
        return Vectors(step=step) if found is None else found.vectors()

    @property
    def last_vectors(self) -> Vectors | None:
        """Of the latest step; None: no fingerprints are taken."""
        return self._kept[-1].vectors() if self._kept and self._kept[-1].values else None

    def _broken(self, taken: StepPrints) -> Break | None:
        if self._left is None:
            return None
        left, now = self._left.prints, taken.prints
        was, again = _taken_twice(left.layout, now.layout)
        changed = (left.values[was] != now.values[again]).nonzero().flatten().tolist()
        if not changed:
            return None
        first = changed[0]
        entry = left.layout.entries[was[first]]
        before, after = int(left.values[was[first]]), int(now.values[again[first]])
        return Break(
            step=taken.step,
            quantity=entry.quantity,
            tensor=entry.tensor,
            num_tensors=len(changed),
            since=self._left_at,
            found=flipped(before, after, entry.num_values, entry.num_bits),
        )


def _on_host(step: int, prints: Prints) -> StepPrints:
    return StepPrints(step, replace(prints, values=prints.values.cpu()))


def _as_left(layout: Layout) -> Layout:
    """What an update begins with, as if one had left it."""
    left = (replace(e, quantity=e.quantity.removeprefix(BEFORE)) for e in layout.entries)
    return Layout(tuple(left))


@lru_cache(_NUM_LAYOUTS)
def _taken_twice(left: Layout, now: Layout) -> tuple[Tensor, Tensor]:
    """The numbers of what an update left, and of the same tensors before the next one."""
    places = {(entry.quantity, entry.tensor): number for number, entry in enumerate(left.entries)}
    pairs = [
        (places[place], number)
        for number, entry in enumerate(now.entries)
        if entry.quantity.startswith(BEFORE)
        and (place := (entry.quantity.removeprefix(BEFORE), entry.tensor)) in places
    ]
    was, again = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return was, again
