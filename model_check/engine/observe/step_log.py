"""A run's own log: each step and each evaluation as an event, and as a line for people."""

import math
from collections.abc import Callable

from model_check.config.schema import Settings
from model_check.engine.metrics import Meter, evaluation_line, step_line
from model_check.engine.observer import Observer
from model_check.engine.reading import Reading
from model_check.events import Evaluation, EventSink, Note, Step


class StepLog(Observer):
    """An event for every step; a line every `log_interval` steps, and for the last."""

    def __init__(
        self, settings: Settings, meter: Meter, say: Callable[[str], None], sink: EventSink
    ) -> None:
        self._max_steps = settings.training.max_steps
        self._log_interval = settings.logging.log_interval
        self._meter, self._say, self._sink = meter, say, sink

    def on_reading(self, reading: Reading, seconds: float) -> None:
        event = Step(
            step=reading.step,
            loss=reading.loss.hex(),
            grad_norm=reading.grad_norm.hex(),
            lr=reading.lr,
            ms=round(seconds * 1000, 3),
            tokens=reading.data.num_positions,
            skipped=reading.skipped,
        )
        self._sink.emit(event)
        num_left = self._max_steps - reading.step - 1
        if reading.step % self._log_interval == 0 or num_left == 0:
            eta_s = num_left * self._meter.step_s
            line = step_line(
                reading.step, self._max_steps, reading.loss, reading.lr, reading.grad_norm, eta_s
            )
            self._say(line)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._sink.emit(evaluation)
        self._say(evaluation_line(evaluation))
        if not math.isfinite(float.fromhex(evaluation.loss)):
            text = f"validation loss of {evaluation.split} is {evaluation.loss}"
            self._sink.emit(Note(text=f"{text} after {evaluation.step} steps"))
