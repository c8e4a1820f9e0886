"""Injects the fault of a drill, by torch's hooks: a training step is the same code with and without
one."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from model_check.config.drill import (
    BACKWARD_KINDS,
    FLIP_KINDS,
    FORWARD_KINDS,
    GRADIENT_KINDS,
    MODULE_KINDS,
    MOMENT_KINDS,
    PROCESS_KINDS,
    WEIGHT_KINDS,
    Drill,
    check_name,
)
from model_check.dist.world import ALONE, World
from model_check.engine.busy import Busy
from model_check.engine.results import StepData, StepResult
from model_check.engine.uncompiled import uncompiled
from model_check.errors import ConfigError
from model_check.forensics.optimizer import Optimizer
from model_check.hooks.hook import Hook


class Injector(Hook):
    """Acts when the training reaches the step of the drill; without a drill it does nothing."""

    def __init__(
        self,
        drill: Drill | None,
        worker: str,
        model: nn.Module,
        optimizer: Optimizer,
        world: World = ALONE,
    ) -> None:
        """Raises ConfigError when the drill names something that `model` lacks."""
        if drill is not None:
            check_name(drill, list(optimizer.named))
            _check_length(drill, dict((*optimizer.named.items(), *model.named_buffers())))
        self._drill = drill if drill and drill.worker in (None, worker) else None
        if self._drill is not None:
            _check_lies_here(self._drill, _weights(model, optimizer))
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._hooks = ExitStack()

    def check_reached(self, from_step: int) -> None:
        """Raises ConfigError when a resumed run begins after the step of the drill."""
        if self._drill and self._drill.step < from_step and self._drill.kind != "slow":
            raise ConfigError(
                f"debug.drill: step {self._drill.step} is never reached: the resumed run goes on "
                f"with step {from_step}"
            )

    def before_step(self, data: StepData) -> None:
        self._hooks.close()
        if self._drill and self._drill.step == data.step:
            self._act(self._drill)

    def after_update(self, data: StepData, _result: StepResult) -> None:
        if self._drill and self._drill.kind == "slow" and self._drill.step <= data.step:
            _prolong(data.busy, self._drill.factor)

    def repeat(self, step: int) -> None:
        """Step `step` is about to be computed again."""
        self._hooks.close()
        if self._drill and self._drill.always and self._drill.step == step:
            self._hook(self._drill)

    def _act(self, drill: Drill) -> None:
        match drill.kind:
            case "raise":
                raise RuntimeError(f"drill: raised at step {drill.step}")
            case "exit7":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                # A signal between Python's last look and an endless wait would be heard by nobody.
                while True:
                    threading.Event().wait(1.0)
            case kind if kind in WEIGHT_KINDS:
                _spoil_in_place(_weights(self._model, self._optimizer)[drill.target], drill)
            case kind if kind in MOMENT_KINDS:
                number = list(self._optimizer.named).index(drill.target)
                _spoil_in_place(self._optimizer.kept(number)[drill.moment], drill)
            case _:
                self._hook(drill)

    def _hook(self, drill: Drill) -> None:
        """For a fault of the step's own numbers: until the step is over."""
        spoiler = _Spoiler(drill)
        kind = drill.kind
        if kind == "loss_nan":
            handle = self._model.get_submodule("loss").register_forward_hook(spoiler.loss)
        elif kind == "flip_gradient" and not self._world.is_alone:
            self._hook_sum(self._optimizer.named[drill.target], spoiler)
            return
        elif kind in GRADIENT_KINDS:
            hooks = {drill.target: spoiler.gradient}
            self._hooks.enter_context(self._world.hooked(self._model, hooks))
            return
        elif kind in MODULE_KINDS:
            # Compiled code was traced without the hook.
            self._hooks.enter_context(uncompiled(self._model))
            handle = _hook_module(self._model.get_submodule(drill.target), spoiler)
        else:
            assert kind in PROCESS_KINDS, f"drill {kind}: nothing injects it"
            return
        self._hooks.callback(handle.remove)

    def _hook_sum(self, parameter: nn.Parameter, spoiler: "_Spoiler") -> None:
        """A flip before the sum over the ranks spreads to all of them alike; behind it, it stays on
        this one."""

        def spoil(summed: Tensor, gradient: Tensor) -> None:
            if summed is parameter and (flipped := spoiler.gradient(gradient)) is not None:
                gradient.copy_(flipped)

        self._hooks.enter_context(self._world.seeing_sums(spoil))


class _Spoiler:
    """Spoils a tensor: the first time, or always."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill
        self._is_due = True

    def forward(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        return self.gradient(output)

    def loss(self, _module: nn.Module, _inputs: object, loss: Tensor) -> Tensor | None:
        """As a real one: its gradients are NaN, too."""
        spoilt = self.gradient(loss)
        return None if spoilt is None else loss * spoilt

    def backward(
        self, _module: nn.Module, of_inputs: tuple[Any, ...], _of_outputs: object
    ) -> tuple[Any, ...] | None:
        first, *others = of_inputs
        spoilt = self.gradient(first)
        return None if spoilt is None else (spoilt, *others)

    def gradient(self, tensor: Tensor) -> Tensor | None:
        if not self._is_due:
            return None
        self._is_due = self.drill.always
        if self.drill.kind in FLIP_KINDS:
            flipped = tensor.clone()
            _flip(flipped.data, self.drill)  # its gradient is that of what was there
            return flipped
        value = torch.zeros_like(tensor)
        value.view(-1)[0] = self.drill.value
        return tensor + value.to(tensor.dtype)


def _hook_gradient(parameter: Tensor, spoiler: _Spoiler) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_hook(spoiler.gradient)  # type: ignore[no-untyped-call]
    return handle


def _hook_module(module: nn.Module, spoiler: _Spoiler) -> RemovableHandle:
    if spoiler.drill.kind in FORWARD_KINDS:
        return module.register_forward_hook(spoiler.forward)
    assert spoiler.drill.kind in BACKWARD_KINDS
    if isinstance(module, nn.Embedding):  # its inputs have no gradients
        return _hook_gradient(module.weight, spoiler)
    return module.register_full_backward_hook(spoiler.backward)


def _spoil_in_place(tensor: Tensor, drill: Drill) -> None:
    if drill.kind in FLIP_KINDS:
        _flip(tensor, drill)
    else:
        tensor.view(-1)[0] = drill.value


def _flip(tensor: Tensor, drill: Drill) -> None:
    """Turn over a bit of its first value, or of as many neighbours as the drill says. Raises
    ConfigError where its values have no such bit."""
    integer = torch.int16 if tensor.itemsize == 2 else torch.int32
    width = 8 * integer.itemsize
    if (bit := drill.bit(width)) >= width:
        raise ConfigError(
            f"debug.drill: {drill.target} makes {str(tensor.dtype).removeprefix('torch.')}, whose "
            f"bits are 0 to {width - 1}: it has no bit {bit}"
        )
    mask = (1 << bit) - (1 << width if bit == width - 1 else 0)
    tensor.view(integer).as_strided((drill.num_values,), (1,)).bitwise_xor_(mask)


def _weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What of them lies here, and the buffers."""
    parameters = {n: optimizer.kept(i)["weights"] for i, n in enumerate(optimizer.named)}
    return parameters | dict(model.named_buffers())


def _check_length(drill: Drill, weights: Mapping[str, Tensor]) -> None:
    """Raises ConfigError for a burst that is longer than its tensor."""
    length = weights[drill.target].numel() if drill.kind in WEIGHT_KINDS else 1
    if drill.num_values > length:
        raise ConfigError(
            f"debug.drill: {drill.target} has {length} values, fewer than a burst of "
            f"{drill.num_values}"
        )


def _check_lies_here(drill: Drill, weights: Mapping[str, Tensor]) -> None:
    """Raises ConfigError where this rank holds too little of a tensor that is to be spoilt."""
    if drill.kind in (*WEIGHT_KINDS, *MOMENT_KINDS):
        num_here = weights[drill.target].numel()
        if num_here < drill.num_values:
            raise ConfigError(
                f"debug.drill: of {drill.target} this rank holds {num_here} values, fewer than "
                f"{drill.num_values}"
            )


def _prolong(busy: Busy, factor: float) -> None:
    """Keep the device busy until the step has taken `factor` times as long as it did."""
    busy.end()
    if busy.is_on_gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(int((busy.ms or 0.0) * (factor - 1) * _cycles_per_ms()))  # type: ignore[no-untyped-call]
        return
    until_s = time.process_time() + (busy.ms or 0.0) * (factor - 1) / 1000
    while time.process_time() < until_s:
        pass


@cache
def _cycles_per_ms() -> float:
    """Of the clock that torch.cuda._sleep counts."""
    num_cycles = 10_000_000
    busy = Busy(torch.device("cuda"))
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]
    busy.end()
    torch.cuda.synchronize()
    return num_cycles / (busy.ms or 1.0)
