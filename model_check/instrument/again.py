"""Calls of a model, made again behind the last step of a replay: workers whose state is equal get
equal bits, unless an operation varies. The process ends there, and nothing need be put back."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from model_check.forensics.fingerprint import has_fingerprint, is_plain
from model_check.instrument.model_hooks import tensors_in
from model_check.utils.wire import CALLS_BITS

MOST_CALLS = 16
"""Of a step."""
_NUM_TIMES = 2, 4, 8, 16
"""As many as there is time for: two workers of other speed compare what both made."""
_LONG_ENOUGH_S = 5.0
_LONGEST = 200
"""Characters of an error that is told."""
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
Sums = Callable[[Sequence[Tensor]], Tensor]


class Call:
    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before it is made."""
        self._module = module
        # A graph that is the script's ends here.
        self._args, self._kwargs = tree_map_only(Tensor, _cut_off, (args, kwargs))
        kinds = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
        self._casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    def make(self, sums: Sums) -> list[int]:
        """Returns the sums of its outputs, and of the gradients that they bring. Raises what the
        module raises."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype))
            # Not by the module itself: its hooks are ours.
            outputs = _floats(_unwrapped(self._module).forward(*self._args, **self._kwargs))
            tensors = [*outputs]
            with suppress(RuntimeError):  # some passes cannot be computed from outputs alone
                tensors += _gradients(self._module, outputs)
            return [int(sums([x.detach()])) for x in tensors if is_plain(x) and has_fingerprint(x)]


def told(calls: Iterable[Call], sums: Sums) -> dict[str, str]:
    """Makes all again and again, and returns a digest of all bits of the first 2 times, 4, 8 and
    16, as far as there was time."""
    calls, digest, made = [*calls], hashlib.blake2b(digest_size=8), 0
    until, found = time.monotonic() + _LONG_ENOUGH_S, {}
    try:
        for times in _NUM_TIMES:
            if made and time.monotonic() >= until:
                break
            for _ in range(times - made):
                digest.update(repr([call.make(sums) for call in calls]).encode())
            made = times
            found[f"{CALLS_BITS} {times}"] = digest.hexdigest()
    except BaseException as error:  # the process ends behind this
        found["calls failed"] = f"{type(error).__name__}: {error}"[:_LONGEST]
    return found


def _unwrapped(module: nn.Module) -> nn.Module:
    """What torch's wrappers call, which count their own calls."""
    inner = vars(module)["_modules"].get("module")
    return inner if inner is not None and type(module).__name__ in _WRAPPERS else module


def _cut_off(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


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
