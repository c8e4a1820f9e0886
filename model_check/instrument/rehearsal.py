"""Both passes of the first step, computed before it: equal calls must give equal bits, or no
difference between workers would prove anything."""

import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from model_check.forensics.fingerprint import has_fingerprint
from model_check.instrument import generators
from model_check.instrument.model_hooks import tensors_in
from model_check.instrument.names import unwrapped

_FEWEST, _MOST, _ENOUGH_S = 3, 8, 1.0
"""Times, and seconds after which the fewest are enough. An operation that varies once in ten is met
by 3 workers of 8 times each with p = 0.92."""
Sums = Callable[[Sequence[Tensor]], Tensor]


class Rehearsal:
    """What the module, its inputs and the generators were is put back each time. Its graphs are its
    own: an operation of the script's may use up what the real graph holds."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._forward: list[list[int]] = []
        self._backward: list[list[int]] = []
        self.why_not = ""
        """Which pass was not computed, and what stopped it; empty: both were."""

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What fails is left to the script's own call."""
        forward = unwrapped(module, ("module",)).forward
        if _has_own_hooks(module):
            self.why_not = "backward: the script hooks its gradients"
        until = time.monotonic() + _ENOUGH_S
        try:
            for number in range(_MOST):
                if number >= _FEWEST and time.monotonic() > until:
                    break
                with _kept(module, args, kwargs), _quiet(logs=number == 0):
                    self._compute(module, forward, args, kwargs)
        except Exception as error:
            self._forward = []
            self.why_not = f"forward: {type(error).__name__}: {error}"

    def is_repeated_by(self, output: Any) -> bool | None:
        """Whether each call gave the bits of this output, and all calls the same gradients; None:
        not known."""
        sums = self._of(_floats(output)) if self._forward else []
        if not sums:
            return None
        gradients = self._backward[:1] * len(self._backward)
        return self._forward == [sums] * len(self._forward) and self._backward == gradients

    def _compute(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        outputs = _floats(forward(*args, **kwargs))
        self._forward.append(self._of(outputs))
        if self.why_not:
            return
        try:
            self._backward.append(self._of(_gradients(module, outputs)))
        except Exception as error:
            self.why_not = f"backward: {type(error).__name__}: {error}"

    def _of(self, tensors: Sequence[Tensor]) -> list[int]:
        return [int(self._sums([x.detach()])) for x in tensors if has_fingerprint(x)]


def _floats(output: Any) -> list[Tensor]:
    return [x for _, x in tensors_in(output) if x.is_floating_point()]


def _gradients(module: nn.Module, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those of the parameters, where the gradients of the outputs are given: any will do, but of
    equal ones a norm or a softmax hands on little."""
    outputs = [x for x in outputs if x.requires_grad]
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not (outputs and parameters):
        return []
    given = [
        torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
        for x in outputs
    ]
    found = torch.autograd.grad(outputs, parameters, given, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _has_own_hooks(module: nn.Module) -> bool:
    """Hooks of the script's: what they do cannot be put back."""
    modules = any(
        vars(each)[hooks]
        for each in module.modules()
        for hooks in ("_backward_hooks", "_backward_pre_hooks")
    )
    return modules or any(parameter._backward_hooks for parameter in module.parameters())


@contextmanager
def _kept(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    before = generators.states()
    modules = list(module.modules())
    tensors = [*module.buffers(), *(x for _, x in tensors_in((args, kwargs)))]
    copies = [(x, x.detach().clone(), x._version) for x in tensors]
    states = [(vars(each), _copied(vars(each))) for each in modules]
    try:
        yield
    finally:
        for own, was in states:
            _put_back(own, was)
        with torch.no_grad():
            for x, copy, version in copies:
                if x._version != version:
                    x.copy_(copy)
        generators.put_back(before)


def _copied(value: Any) -> dict[str, tuple[Any, Any]]:
    """Attribute -> it, and what it holds: of a container a copy, of a generator its state."""
    return {name: (held, _content(held)) for name, held in value.items()}


def _content(held: Any) -> Any:
    if isinstance(held, torch.Generator):
        return held.get_state()
    return held.copy() if isinstance(held, dict | list | set) else None


def _put_back(own: dict[str, Any], was: dict[str, tuple[Any, Any]]) -> None:
    for name in own.keys() - was.keys():
        del own[name]
    for name, (held, content) in was.items():
        own[name] = held
        if isinstance(held, torch.Generator):
            held.set_state(content)
        elif isinstance(held, list):
            held[:] = content
        elif isinstance(held, dict | set):
            held.clear()
            held.update(content)


@contextmanager
def _quiet(*, logs: bool) -> Iterator[None]:
    """What the script prints it prints in its own call. What is told once in a process (a warning,
    a line of a log) is told here, or never."""
    streams, show, disabled = (sys.stdout, sys.stderr), warnings.showwarning, logging.root.manager

    def show_once(*args: Any, **kwargs: Any) -> None:
        muted, sys.stderr = sys.stderr, streams[1]
        try:
            show(*args, **kwargs)
        finally:
            sys.stderr = muted

    level = disabled.disable
    sys.stdout = sys.stderr = io.StringIO()
    warnings.showwarning = show_once
    if not logs:
        logging.disable()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        warnings.showwarning = show
        logging.disable(level)
