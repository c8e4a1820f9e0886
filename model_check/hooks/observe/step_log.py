"""A run's own log: each step, evaluation and sample as an event, and as a line for people."""

import math
from collections.abc import Sequence

from model_check.config.schema import Settings
from model_check.engine.metrics import Meter, evaluation_line, sample_line, step_line
from model_check.engine.results import StepMetrics
from model_check.engine.run_context import Channels
from model_check.events import Evaluation, Note, Sample, Step
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.hook import RunObserver


class StepLog(RunObserver):
    """An event for every step; a line every `log_interval` steps, and for the last."""

    def __init__(
        self,
        settings: Settings,
        meter: Meter,
        channels: Channels,
        checksums: ChecksumLog,
    ) -> None:
        self._max_steps = settings.training.max_steps
        self._log_interval = settings.logging.log_interval
        self._checksums = checksums
        self._meter, self._say, self._sink = meter, channels.say, channels.sink

    def on_result(self, metrics: StepMetrics) -> None:
        step, loss, grad_norm, lr = metrics.step, metrics.loss, metrics.grad_norm, metrics.lr
        busy_ms = metrics.data.busy.ms
        event = Step(
            step=step,
            loss=loss.hex(),
            grad_norm=grad_norm.hex(),
            lr=lr,
            ms=round(self._meter.seconds * 1000, 3),
            tokens=metrics.data.num_positions,
            fp=self._checksums.roll_ups,
            taken=self._checksums.taken,
            repeated=self._checksums.repeated,
            busy_ms=None if busy_ms is None else round(busy_ms, 3),
            own_loss=None if metrics.own_loss is None else metrics.own_loss.hex(),
            wait_ms=None if metrics.wait_ms is None else round(metrics.wait_ms, 3),
        )
        self._sink.emit(event)
        num_left = self._max_steps - step - 1
        if step % self._log_interval == 0 or num_left == 0:
            eta_s = num_left * self._meter.step_s
            self._say(step_line(step, self._max_steps, loss, lr, grad_norm, eta_s))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._sink.emit(evaluation)
        self._say(evaluation_line(evaluation))
        if not math.isfinite(float.fromhex(evaluation.loss)):
            text = f"validation loss of {evaluation.split} is {evaluation.loss}"
            self._sink.emit(Note(text=f"{text} after {evaluation.step} steps"))

    def on_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._sink.emit(sample)
            self._say(sample_line(sample))
