"""What a run measures beside loss and norm: speed, MFU, memory, waiting for data. One step of it
goes to events, TensorBoard and W&B alike."""

from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path
from typing import Protocol

from torch import Tensor

from model_check.config.schema import LoggingSettings
from model_check.engine.metrics import Meter, current_memory_bytes, peak_memory_bytes
from model_check.engine.results import StepData, StepMetrics, StepResult
from model_check.engine.run_context import Channels
from model_check.errors import StorageError
from model_check.events import Evaluation, Metrics, Sample
from model_check.hooks.hook import RunObserver
from model_check.hooks.observe.gates import scalars_of
from model_check.hooks.observe.gpu_figures import gpu_figures
from model_check.hooks.observe.mfu import Utilisation

GATES = "gates"
"""The note of a step."""
_LARGEST_EXPONENT = 88.0
"""TensorBoard keeps float32."""


class Writer(Protocol):
    """A log for people: TensorBoard, W&B. Each method raises StorageError."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Of one step, one at least."""


class ScalarLog(RunObserver):
    """Writes each step, and every `log_interval` steps what was measured since the last report, and
    prints a line of it every `speed_interval` steps. The first step pays for warm-up, so no rate
    counts it.

    A writer that cannot begin raises StorageError, since nobody would see what was asked for. One
    that fails later is reported and left out: training is worth more than its log.
    """

    def __init__(
        self,
        max_steps: int,
        logging: LoggingSettings,
        utilisation: Utilisation,
        channels: Channels,
        meter: Meter,
        writers: Sequence[Writer] = (),
        telemetry: Path | None = None,
        gates: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        """`telemetry`: the file in which the launcher notes how its GPU does; None: nobody does.
        `gates`: returns those of the model, [layers, query heads] on the device; None: it has none.
        All ranks ask."""
        self._max_steps, self._logging = max_steps, logging
        self._utilisation, self._channels = utilisation, channels
        self._writers, self._has_written = list(writers), False
        self._meter, self._telemetry, self._gates = meter, telemetry, gates
        self._run, self._lately, self._printed = _Span(), _Span(), _Span()
        self._num_read = 0

    def after_update(self, _data: StepData, result: StepResult) -> None:
        if (gates := self._gates()) is not None:
            result.notes[GATES] = gates

    def on_result(self, step: StepMetrics) -> None:
        self._num_read += 1
        seconds = self._meter.seconds
        if self._num_read > 1:
            self._run.add(step, seconds)
            self._lately.add(step, seconds)
            self._printed.add(step, seconds)
        last = step.step == self._max_steps - 1
        scalars = scalars_of_step(step) if self._writers else {}
        if step.step % self._logging.log_interval == 0 or last:
            scalars |= self._report(step)
            self._lately = _Span()
        interval = self._logging.speed_interval
        if interval is not None and self._printed.tokens_per_s and step.step % interval == 0:
            self._channels.say(self._speed(step.step, self._printed.tokens_per_s))
            self._printed = _Span()
        if scalars:
            self._write(step.step, lambda writer: writer.write(step.step, scalars))
        if last:
            self._channels.say(self._conclusion())

    def on_evaluation(self, evaluation: Evaluation) -> None:
        loss = float.fromhex(evaluation.loss)
        scalars = {
            "loss": loss,
            "perplexity": evaluation.perplexity,
            "token_accuracy": evaluation.token_accuracy,
            "exact_match": evaluation.exact_match,
        }
        named = {f"eval/{evaluation.split}/{n}": v for n, v in scalars.items() if v is not None}
        self._write(evaluation.step, lambda writer: writer.write(evaluation.step, named))

    def on_samples(self, samples: Sequence[Sample]) -> None:
        if samples:
            self._write(samples[0].step, lambda writer: writer.write_samples(samples))

    def _report(self, step: StepMetrics) -> dict[str, float]:
        """Emits what was measured, and returns it for the writers, if there are any."""
        rate, gates = self._lately.tokens_per_s, step.result.notes.get(GATES)
        metrics = Metrics(
            step=step.step,
            tokens_per_s=rate,
            mfu_full=self._utilisation.full(rate),
            mfu_causal=self._utilisation.causal(rate),
            data_wait=self._lately.data_wait,
            memory_bytes=current_memory_bytes(),
            peak_memory_bytes=peak_memory_bytes(),
            loss_scale=step.loss_scale,
            gates=None if gates is None else gates.sigmoid().tolist(),
        )
        self._channels.sink.emit(metrics)
        if not self._writers:
            return {}
        gpu = {} if self._telemetry is None else gpu_figures(self._telemetry)
        return scalars_of_report(metrics) | gpu

    def _speed(self, step: int, tokens_per_s: float) -> str:
        memory, peak = current_memory_bytes() / 2**30, peak_memory_bytes() / 2**30
        known = self._utilisation.peak is not None
        mfu = f" | MFU: {self._utilisation.describe(tokens_per_s)}" if known else ""
        return (
            f"Speed [{step}/{self._max_steps}] | Tokens/s: {tokens_per_s:,.0f}{mfu} | "
            f"Memory: {memory:.2f} GiB, peak {peak:.2f}"
        )

    def _write(self, step: int, write: Callable[[Writer], None]) -> None:
        for writer in [*self._writers]:
            try:
                write(writer)
            except StorageError as failure:
                if not self._has_written:
                    raise
                self._writers.remove(writer)
                self._channels.note(f"from step {step} on no longer logged: {failure}")
        self._has_written = True

    def _conclusion(self) -> str:
        wait = self._run.data_wait
        waited = "n/a" if wait is None else f"{wait:.1%} of the time"
        if self._utilisation.peak is None:
            return f"Waited for data: {waited}"
        share = self._utilisation.describe(self._run.tokens_per_s)
        return f"MFU {share}; waited for data: {waited}"


class _Span:
    """Steps, added up."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._wait_s = 0.0
        self._tokens = 0

    def add(self, step: StepMetrics, seconds: float) -> None:
        self._seconds += seconds
        self._wait_s += step.data.wait_s
        self._tokens += step.data.num_positions

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    @property
    def data_wait(self) -> float | None:
        """Share of the time."""
        return min(1.0, self._wait_s / self._seconds) if self._seconds > 0 else None


def scalars_of_step(step: StepMetrics) -> dict[str, float]:
    """By the names that TensorBoard and W&B show; without what is not known."""
    named = {
        "train/loss": step.loss,
        "train/perplexity": exp(step.loss) if step.loss < _LARGEST_EXPONENT else None,
        "train/grad_norm": step.grad_norm,
        "train/learning_rate": step.lr,
        "train/loss_scale": step.loss_scale,
    }
    return {name: value for name, value in named.items() if value is not None}


def scalars_of_report(metrics: Metrics) -> dict[str, float]:
    """The same for what was measured over several steps."""
    named = {
        "speed/tokens_per_s": metrics.tokens_per_s,
        "speed/mfu_full": metrics.mfu_full,
        "speed/mfu_causal": metrics.mfu_causal,
        "speed/data_wait": metrics.data_wait,
        "memory/allocated_gib": metrics.memory_bytes / 2**30,
        "memory/peak_gib": metrics.peak_memory_bytes / 2**30,
        **scalars_of(metrics.gates or []),
    }
    return {name: value for name, value in named.items() if value is not None}
