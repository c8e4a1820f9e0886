"""The interface of everything that follows a run: its log, TensorBoard, a profiler."""

from collections.abc import Sequence

from model_check.engine.reading import StepMetrics
from model_check.events import Evaluation, Sample, Scalar


class RunObserver:
    """Called between steps, on the training thread: be quick. Override what you need."""

    def before_step(self, step: int) -> None:
        """Step `step` is about to be enqueued."""

    def pause(self, paused: bool) -> None:
        """Work that is not training begins, or is over: an evaluation, a save."""

    def on_step(self, metrics: StepMetrics, seconds: float) -> None:
        """A finite step was read, in order, late by the reader's lag at most. `seconds`: its wall
        time."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A validation split was evaluated."""

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """The model was asked; none: another rank tells what it said."""

    def kept(self) -> dict[str, Scalar]:
        """What checkpoints keep for this observer."""
        return {}

    def restore(self, kept: dict[str, Scalar]) -> None:
        """A checkpoint was resumed that kept this, for all observers."""

    def close(self) -> None:
        """The run is over, however it ended."""
