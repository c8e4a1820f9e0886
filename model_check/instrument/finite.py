"""Where a value that is not finite was born: of each leaf of a model the sum of its output, and of
that's gradient. They are read when a gradient is not finite, and at no other time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = 1 << 16


class Sum(NamedTuple):
    """Not finite where a value is not."""

    module: str
    is_forward: bool
    shape: list[int]
    value: Tensor


class LeafSums:
    """In the order of computation. Nothing here waits for the device."""

    def __init__(self) -> None:
        self._sums: list[Sum] = []

    def take(self, module: str, x: Tensor, *, is_forward: bool) -> None:
        if len(self._sums) < _MOST:
            value = x.detach().sum(dtype=torch.float32)
            self._sums.append(Sum(module, is_forward, list(x.shape), value))

    def first_bad(self) -> Sum | None:
        """Waits for the device."""
        return next((each for each in self._sums if not each.value.isfinite()), None)


def as_origin(found: Sum) -> dict[str, Any]:
    """As `Origin` of model_check.events; its values are gone, and so not counted."""
    return {
        "direction": "forward" if found.is_forward else "backward",
        "module": found.module,
        "tensor": "output" if found.is_forward else "gradient of output",
        "shape": found.shape,
        "num_nan": 0,
        "num_inf": 0,
        "first": [],
    }
