"""Whoever wants to know what a run does: its log, TensorBoard, a profiler. The loop tells them and
asks nothing back."""

from model_check.engine.reading import Reading
from model_check.events import Evaluation, Scalar


class Observer:
    """Told between steps, on the training thread: be quick. Override what is of interest."""

    def before_step(self, step: int) -> None:
        """Step `step` is about to be enqueued."""

    def on_reading(self, reading: Reading, seconds: float) -> None:
        """A finite step was read, in order, at most the reader's lag late; `seconds` is its wall
        time."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A validation split was evaluated."""

    def kept(self) -> dict[str, Scalar]:
        """What a checkpoint shall keep of it."""
        return {}

    def restore(self, kept: dict[str, Scalar]) -> None:
        """A checkpoint was resumed that kept this, of all observers."""

    def close(self) -> None:
        """The run is over, however it ended."""
