"""Both passes of the first step, computed before it: equal calls must give equal bits, or no
difference between workers would prove anything."""

import logging
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from model_check.forensics.fingerprint import has_fingerprint, is_plain
from model_check.instrument import generators
from model_check.instrument.model_hooks import ModuleHook, tensors_in

_NUM_TIMES = 5
"""The same in each worker and in each rank, whose collectives count them."""
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
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
        if why_not := _obstacle(module, args, kwargs):
            self.why_not = f"both passes: {why_not}"
            return
        if _has_gradient_hooks(module):
            self.why_not = "backward pass: the script hooks its gradients"
        forward = _unwrapped(module).forward
        # A graph that is the script's ends here: parts of a model may share their weights.
        own_args, own_kwargs = tree_map_only(Tensor, _cut_off, (args, kwargs))
        try:
            for number in range(_NUM_TIMES):
                with _kept(module, args, kwargs), _quiet(logs=number == 0), _own_graph():
                    self._compute(module, forward, own_args, own_kwargs)
        except Exception as error:
            self._forward = []
            self.why_not = f"forward pass: {type(error).__name__}: {error}"

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
            self.why_not = f"backward pass: {type(error).__name__}: {error}"

    def _of(self, tensors: Sequence[Tensor]) -> list[int]:
        return [int(self._sums([x.detach()])) for x in tensors if has_fingerprint(x)]


def _unwrapped(module: nn.Module) -> nn.Module:
    """What torch's wrappers call, which count their own calls."""
    inner = vars(module)["_modules"].get("module")
    return inner if inner is not None and type(module).__name__ in _WRAPPERS else module


def _cut_off(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _own_graph() -> Any:
    """Who checkpoints a module counts what it saves."""
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(x: Any) -> Any:
    return x


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


def _obstacle(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Returns why its forward pass cannot be computed more than once; empty: it can."""
    tensors = _tensors_of(module, args, kwargs)
    if any(map(is_lazy, tensors)):
        return "the model has parameters without a shape"
    if not all(map(is_plain, tensors)):
        return "a tensor of it is sparse, sharded, or of a class of its own"
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    found = (hook for m in module.modules() for name in hooks for hook in vars(m)[name].values())
    return "" if all(isinstance(hook, ModuleHook) for hook in found) else "the script hooks them"


def _has_gradient_hooks(module: nn.Module) -> bool:
    """Hooks of the script's: what they do cannot be put back."""
    modules = any(
        vars(each)[hooks]
        for each in module.modules()
        for hooks in ("_backward_hooks", "_backward_pre_hooks")
    )
    return modules or any(parameter._backward_hooks for parameter in module.parameters())


def _tensors_of(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns what a forward pass can write: parameters, buffers, attributes, and its inputs."""
    held = (x for m in module.modules() for x in vars(m).values() if isinstance(x, Tensor))
    of_call = (x for _, x in tensors_in((args, kwargs)))
    return [*module.parameters(), *module.buffers(), *held, *of_call]


@contextmanager
def _kept(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    before = generators.states()
    # Not by their versions: batch norm writes its statistics past them.
    copies = [(x, x.data, x.detach().clone()) for x in _tensors_of(module, args, kwargs)]
    states = [(vars(each), _copied(vars(each))) for each in module.modules()]
    try:
        yield
    finally:
        generators.put_back(before)
        for own, was in states:
            _put_back(own, was)
        for x, values, copy in copies:
            if not torch.equal(values, copy):
                values.copy_(copy)
            if x.data_ptr() != values.data_ptr():
                x.data = values


def _copied(value: Any) -> dict[str, tuple[Any, Any]]:
    """Attribute -> it, and what it holds: of a container a copy, of a generator its state."""
    return {name: (held, _content(held)) for name, held in value.items()}


def _content(held: Any) -> Any:
    if isinstance(held, torch.Generator):
        return held.get_state()
    if isinstance(held, random.Random):
        return held.getstate()
    if hasattr(held, "bit_generator"):
        return held.bit_generator.state
    is_copied = isinstance(held, dict | list | set | deque) or hasattr(held, "__array_interface__")
    return held.copy() if is_copied else None


def _put_back(own: dict[str, Any], was: dict[str, tuple[Any, Any]]) -> None:
    for name in own.keys() - was.keys():
        del own[name]
    for name, (held, content) in was.items():
        own[name] = held
        if isinstance(held, torch.Generator):
            held.set_state(content)
        elif isinstance(held, random.Random):
            held.setstate(content)
        elif hasattr(held, "bit_generator"):
            held.bit_generator.state = content
        elif isinstance(held, list):
            held[:] = content
        elif isinstance(held, deque):
            held.clear()
            held.extend(content)
        elif isinstance(held, dict | set):
            held.clear()
            held.update(content)
        elif hasattr(held, "__array_interface__") and not isinstance(held, Tensor):
            held[...] = content


class _Muted:
    """A stream to which this thread writes nothing; others do."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))


@contextmanager
def _quiet(*, logs: bool) -> Iterator[None]:
    """What the script prints it prints in its own call. What is told once in a process (a warning,
    a line of a log) is told here, or never."""
    streams, show, manager = (sys.stdout, sys.stderr), warnings.showwarning, logging.root.manager

    def show_once(*args: Any, **kwargs: Any) -> None:
        muted, sys.stderr = sys.stderr, streams[1]
        try:
            show(*args, **kwargs)
        finally:
            sys.stderr = muted

    level = manager.disable
    sys.stdout, sys.stderr = (_Muted(stream) for stream in streams)
    warnings.showwarning = show_once
    if not logs:
        logging.disable()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        warnings.showwarning = show
        logging.disable(level)
