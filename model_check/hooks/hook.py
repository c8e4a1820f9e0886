"""What the training loop calls: the interface of everything that a run does beside training."""

from collections.abc import Sequence
from typing import Protocol

from model_check.engine.results import StepData, StepMetrics, StepResult
from model_check.events import Evaluation, Sample, Scalar


class Loop(Protocol):
    """The loop, for a hook that ends it."""

    @property
    def num_done(self) -> int:
        """Steps that the state has behind it."""

    def flush(self) -> list[StepMetrics]:
        """Returns the numbers of the steps that nobody has looked at yet."""

    def train_unchecked(self) -> None:
        """Trains one more step, whose numbers nobody looks at."""


class Hook:
    """Called hook after hook in the order of their list, on the training thread: be quick. Override
    what you need. An error ends the training."""

    def begin(self) -> None:
        """The training is about to begin."""

    def before_step(self, data: StepData) -> None:
        """A step is about to be computed."""

    def after_backward(self, data: StepData) -> None:
        """The gradients of the step are whole, and not clipped yet."""

    def after_update(self, data: StepData, result: StepResult) -> None:
        """The step is computed, or on a GPU enqueued. float16 may compute it once more: after an
        overflow."""

    def on_result(self, metrics: StepMetrics) -> None:
        """The numbers of a step have arrived, in order, as many steps late as AsyncMetrics lags."""

    def is_due(self, num_done: int) -> bool:
        """Returns whether `between_steps` is to be called after so many steps. It is asked once
        behind each step, so that a hook may also wait or answer here (Lockstep does)."""
        return False

    def between_steps(self, num_done: int) -> None:
        """So many steps are done, and every `on_result` was called."""

    def on_last_step(self, *, early: bool) -> None:
        """No step follows; `early`: because the run was asked to end."""

    def finish(self, num_done: int, *, early: bool) -> None:
        """The training has ended well, and every hook has heard so."""

    def on_error(self, error: Exception, loop: Loop) -> None:
        """The loop ends by this exception: an error, or a request to end."""

    def close(self, error: BaseException | None) -> None:
        """The run is over, however it ended; in reverse order of the list."""


class Periodic(Hook):
    """A hook whose work is due every so many steps, and once more at the end."""

    def __init__(self, interval: int | None) -> None:
        """None: never."""
        self._interval = interval

    def is_due(self, num_done: int) -> bool:
        return self._interval is not None and num_done % self._interval == 0

    def finish(self, num_done: int, *, early: bool) -> None:
        if not early and self._interval is not None and not self.is_due(num_done):
            self.between_steps(num_done)


class RunObserver(Hook):
    """A hook that follows a run: its log, TensorBoard, a profiler. It hears of finite steps
    only."""

    def pause(self, paused: bool) -> None:
        """Work that is not training begins, or is over: an evaluation, a save."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A validation split was evaluated."""

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """The model was asked; none: another rank tells what it said."""

    def kept(self) -> dict[str, Scalar]:
        """What checkpoints keep for this observer."""
        return {}

    def restore(self, kept: dict[str, Scalar]) -> None:
        """A checkpoint was resumed that kept this, for all observers."""
