"""Injects the fault of a drill, by hooks: a training step is the same code with and without one."""

import os
import signal
import threading

import torch
from torch import Tensor, nn

from model_check.config.drill import (
    DEFAULT_PARAMETER,
    GRADIENT_KINDS,
    PARAMETER_KINDS,
    Drill,
    check_name,
)
from model_check.errors import ConfigError

_FLIPPED_BIT = 1 << 16
"""The lowest bit of a float32 weight that its bfloat16 copy still has: 2^-7 of the value."""


class Injector:
    """Acts when the trainer reaches the step of the drill; without a drill it does nothing."""

    def __init__(self, drill: Drill | None, worker: str, model: nn.Module) -> None:
        """Raises ConfigError when the drill names a parameter that `model` lacks."""
        self._step = -1
        self._parameter = _find(drill, model) if drill else None
        self._drill = drill if drill and drill.worker in (None, worker) else None
        if self._drill and self._drill.kind == "loss_nan":
            model.register_forward_hook(self._spoil_loss)
        elif self._drill and self._drill.kind in GRADIENT_KINDS and self._parameter is not None:
            self._parameter.register_hook(self._spoil_gradient)  # type: ignore[no-untyped-call]

    def check_reached(self, from_step: int) -> None:
        """Raises ConfigError when a resumed run begins after the step of the drill."""
        if self._drill and self._drill.step < from_step:
            raise ConfigError(
                f"debug.drill: step {self._drill.step} is never reached: the resumed run goes on "
                f"with step {from_step}"
            )

    def before_step(self, step: int) -> None:
        """Step `step` begins: faults of weights and of the process happen now."""
        self.repeat(step)
        if self._drill and self._due():
            _act(self._drill, self._parameter)

    def repeat(self, step: int) -> None:
        """Step `step` is computed again: faults of its own numbers come back, no others."""
        self._step = step

    def _due(self) -> bool:
        return self._drill is not None and self._step == self._drill.step

    def _spoil_gradient(self, gradient: Tensor) -> Tensor | None:
        if not self._due() or self._drill is None:
            return None
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = float(self._drill.kind)
        return spoilt

    def _spoil_loss(self, _model: nn.Module, _inputs: object, loss: Tensor) -> Tensor | None:
        return loss * float("nan") if self._due() else None


def _find(drill: Drill, model: nn.Module) -> nn.Parameter | None:
    if drill.kind not in PARAMETER_KINDS:
        return None
    parameters = dict(model.named_parameters())
    check_name(drill, parameters)
    return parameters[drill.parameter or DEFAULT_PARAMETER]


def _act(drill: Drill, parameter: nn.Parameter | None) -> None:
    match drill.kind:
        case "flip" if parameter is not None:
            bits = parameter.detach().view(torch.int32).view(-1)
            bits[0] ^= _FLIPPED_BIT
        case "raise":
            raise RuntimeError(f"drill: raised at step {drill.step}")
        case "exit7":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()
