"""What the host makes of a run's fingerprints: the roll-ups of each step, the vectors of the last
ones, and whether state stays as the last update left it."""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from model_check.engine.fingerprints import Entry, Prints
from model_check.engine.reading import StepMetrics
from model_check.events import Break, Vectors
from model_check.utils.fingerprint import BEFORE, flipped, roll_up

NUM_KEPT = 8
"""Steps whose vectors stay: more than workers may be apart."""
_PASSES = ("forward", "backward", "gradients")
"""What depends on weights and data alone."""
_MODULUS = 1 << 64


@dataclass(frozen=True)
class StepPrints:
    """A step's fingerprints, on the host."""

    step: int
    prints: Prints

    @cached_property
    def values(self) -> dict[Entry, int]:
        """Unsigned, in the order of the entries."""
        numbers = self.prints.values.tolist()
        return dict(zip(self.prints.entries, (n % _MODULUS for n in numbers), strict=True))

    @cached_property
    def roll_ups(self) -> dict[str, str]:
        return {q: f"{roll_up(v.values()):016x}" for q, v in self._by_quantity.items()}

    def vectors(self) -> Vectors:
        return Vectors(
            step=self.step,
            fp={
                quantity: {entry.tensor: f"{value:016x}" for entry, value in values.items()}
                for quantity, values in self._by_quantity.items()
            },
            sizes={e.tensor: (e.num_values, e.num_bits) for e in self.values if e.num_bits},
        )

    def of(self, quantities: tuple[str, ...]) -> dict[Entry, int]:
        return {e: value for e, value in self.values.items() if e.quantity in quantities}

    @cached_property
    def _by_quantity(self) -> dict[str, dict[Entry, int]]:
        found: dict[str, dict[Entry, int]] = {}
        for entry, value in self.values.items():
            found.setdefault(entry.quantity, {})[entry] = value
        return found


class FingerprintLog:
    """Of one worker."""

    def __init__(self) -> None:
        self._kept: deque[StepPrints] = deque(maxlen=NUM_KEPT)
        self._rehearsal: dict[Entry, int] = {}
        self._scale: float | None = None
        self._left: dict[tuple[str, str], int] = {}
        """(quantity, tensor) -> what the last update left, as far as it was taken."""
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

    def begin(self, prints: Prints, loss_scale: float | None = None) -> None:
        """The state that the first step begins with, and both its passes, where they were computed
        once before it, at this loss scale."""
        rehearsal = StepPrints(-1, prints)
        self._rehearsal, self._scale = rehearsal.of(_PASSES), loss_scale
        self._left = {
            _place(entry): value
            for entry, value in rehearsal.values.items()
            if entry.quantity.startswith(BEFORE)
        }

    def take(self, metrics: StepMetrics) -> None:
        """A step that was just read."""
        if metrics.prints is None:
            return
        taken = StepPrints(metrics.step, metrics.prints)
        self.repeated = None
        # Where it overflowed it was trained again at a smaller scale.
        if self._rehearsal and metrics.loss_scale == self._scale:
            self.repeated = self._rehearsal == taken.of(_PASSES)
        self._rehearsal = {}
        self._kept.append(taken)

    def check(self) -> Break | None:
        """Whether the latest step found its state as the update before had left it."""
        if not self._kept:
            return None
        taken = self._kept[-1]
        found = self._broken(taken)
        self._left_at = taken.step
        self._left = {
            _place(entry): value
            for entry, value in taken.values.items()
            if not entry.quantity.startswith(BEFORE)
        }
        return found

    def check_state(self, prints: Prints) -> Break | None:
        """The same for the state now, behind the latest step."""
        if self._left_at is None:
            return None
        return self._broken(StepPrints(self._left_at + 1, prints))

    def vectors(self, step: int) -> Vectors:
        """Without fingerprints where the step is not kept any more."""
        found = next((taken for taken in reversed(self._kept) if taken.step == step), None)
        return Vectors(step=step) if found is None else found.vectors()

    @property
    def last_vectors(self) -> Vectors | None:
        """Of the latest step; None: no fingerprints are taken."""
        return self._kept[-1].vectors() if self._kept and self._kept[-1].values else None

    def _broken(self, taken: StepPrints) -> Break | None:
        changed = [
            (entry, before, value)
            for entry, value in taken.values.items()
            if entry.quantity.startswith(BEFORE)
            and (before := self._left.get(_place(entry), value)) != value
        ]
        if not changed:
            return None
        entry, before, after = changed[0]
        quantity, tensor = _place(entry)
        return Break(
            step=taken.step,
            quantity=quantity,
            tensor=tensor,
            num_tensors=len(changed),
            since=self._left_at,
            found=flipped(before, after, entry.num_values, entry.num_bits),
        )


def _place(entry: Entry) -> tuple[str, str]:
    return entry.quantity.removeprefix(BEFORE), entry.tensor
