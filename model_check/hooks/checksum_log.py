"""The fingerprints of one worker: the vectors of the last steps, and what is told of them."""

from collections import deque

from model_check.engine.results import StepMetrics
from model_check.events import Break, Vectors
from model_check.forensics.checksums import (
    NUM_KEPT,
    Change,
    ChecksumKey,
    ChecksumVector,
    Continuity,
)

_PASSES = ("forward", "backward", "gradients")
"""What depends on weights and data alone."""


class ChecksumLog:
    """The fingerprints of one worker."""

    def __init__(self) -> None:
        self._kept: deque[ChecksumVector] = deque(maxlen=NUM_KEPT)
        self._first: dict[ChecksumKey, int] = {}
        """Of the first step, when it was computed before it."""
        self._of_first: tuple[str, float | None] = "", None
        """Its loss, exact, and the scale of that."""
        self._state = Continuity()
        self.repeated: bool | None = None
        """Whether the latest step, if it is the first, gave the same bits as before it."""

    @property
    def roll_ups(self) -> dict[str, str]:
        """Of the latest step."""
        return self._kept[-1].roll_ups if self._kept else {}

    @property
    def taken(self) -> str:
        """Which tensors the roll-ups cover."""
        return self._kept[-1].taken if self._kept else ""

    def begin(
        self, vector: ChecksumVector, loss: float = 0.0, loss_scale: float | None = None
    ) -> None:
        """`vector`: of the state that the first step begins with, and of both its passes, where
        they were computed once before it: they gave this loss, of this rank, at this loss scale."""
        self._first = self._state.begin(vector).of(_PASSES)
        self._of_first = loss.hex(), loss_scale

    def take(self, metrics: StepMetrics, vector: ChecksumVector) -> None:
        """A step that was just read; `vector`: of it, on the host."""
        self.repeated = None
        # Where it overflowed it was trained again at a smaller scale.
        loss, scale = self._of_first
        is_same = self._first and metrics.loss_scale == scale
        if is_same and self._state.changed(vector) is None:  # from the same state
            own = metrics.loss if metrics.own_loss is None else metrics.own_loss
            self.repeated = self._first == vector.of(_PASSES) and own.hex() == loss
        self._first = {}
        self._kept.append(vector)

    def check(self) -> Break | None:
        """Whether the latest step found its state as the update before had left it."""
        if not self._kept:
            return None
        found = self._state.changed(self._kept[-1])
        self._state.update(self._kept[-1])
        return _as_break(found)

    def check_state(self, vector: ChecksumVector) -> Break | None:
        """The same for the state now, behind the latest step."""
        return _as_break(self._state.changed_now(vector))

    def vectors(self, step: int) -> Vectors:
        """Without fingerprints where the step is not kept any more."""
        found = (vector for vector in self._kept if vector.step == step)
        return next(map(_as_event, found), Vectors(step=step))

    @property
    def last_vectors(self) -> Vectors | None:
        """Of the latest step; None: no fingerprints are taken."""
        return _as_event(self._kept[-1]) if self._kept and self._kept[-1].numbers else None


def _as_event(vector: ChecksumVector) -> Vectors:
    return Vectors(step=vector.step, fp=vector.as_told(), sizes=vector.sizes)


def _as_break(change: Change | None) -> Break | None:
    return None if change is None else Break(**change._asdict())
