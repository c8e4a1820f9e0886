"""A second line for each step line (logging.details): speed, memory, and where the gradient is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_check.config.schema import Settings
from model_check.engine.metrics import Meter, current_memory_bytes, peak_memory_bytes
from model_check.engine.results import StepMetrics
from model_check.hooks.hook import RunObserver
from model_check.utils.words import Say


class DetailLog(RunObserver):
    """`parameters`: their names, in the order of the model."""

    def __init__(
        self, settings: Settings, parameters: Sequence[str], meter: Meter, say: Say
    ) -> None:
        self._max_steps, self._meter, self._say = settings.training.max_steps, meter, say
        self._log_interval = settings.logging.log_interval
        self._parts: dict[str, list[int]] = {}
        """Part of the model -> the numbers of its parameters."""
        for number, name in enumerate(parameters):
            self._parts.setdefault(_part(name), []).append(number)

    def on_result(self, metrics: StepMetrics) -> None:
        step = metrics.step
        if step % self._log_interval and step + 1 < self._max_steps:
            return
        memory, peak = current_memory_bytes() / 2**30, peak_memory_bytes() / 2**30
        norms = self._norms(metrics.result.grad_norms)
        self._say(
            f"Details [{step}/{self._max_steps}] | "
            f"Tokens/s: {metrics.data.num_positions / self._meter.seconds:,.0f} | "
            f"Memory: {memory:.2f} GiB, peak {peak:.2f} | Grad Norm by part: {norms}"
        )

    def _norms(self, of_parameters: Tensor) -> str:
        """`layers.0 0.5400, layers.1 0.3300`: the norm over all parameters of a part."""
        return ", ".join(
            f"{part} {torch.linalg.vector_norm(of_parameters[numbers]):.4f}"
            for part, numbers in self._parts.items()
        )


def _part(parameter: str) -> str:
    """`layers.3` of `layers.3.attention.wq.weight`, `norm` of `norm.weight`."""
    first, _, rest = parameter.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else first
