"""Where a value that is not finite was born: of each leaf of a model the sum of its output, and
whether the gradient of that was finite. They are read when a gradient is not finite, and at no
other time."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = 1 << 16


class Sum(NamedTuple):
    """Of the output of a leaf. Not finite where a value is not."""

    module: str
    shape: list[int]
    value: Tensor


class Origin(NamedTuple):
    module: str
    shape: list[int]
    is_forward: bool


class LeafSums:
    """In the order of computation. Nothing here waits for the device."""

    def __init__(self, are_all: bool = True) -> None:
        self.are_all = are_all
        """False: of some no sum is taken, so nothing tells where a value was born."""
        self._outputs: list[Sum] = []
        self._gradients: defaultdict[str, list[Tensor]] = defaultdict(list)
        """Module -> sums of the gradients of its outputs."""

    def take(self, module: str, output: Tensor) -> None:
        if len(self._outputs) < _MOST:
            self._outputs.append(Sum(module, list(output.shape), _sum(output)))

    def take_gradient(self, module: str, gradient: Tensor) -> None:
        """Of an output, where no gradient of a parameter tells whether it was finite."""
        if len(self._gradients[module]) < _MOST:
            self._gradients[module].append(_sum(gradient))

    def origin(self, bad: Sequence[str]) -> Origin | None:
        """`bad`: the parameters whose gradients are not finite. Waits for the device."""
        if not self.are_all:
            return None
        for module, shape, value in self._outputs:
            if not value.isfinite():
                return Origin(module, shape, is_forward=True)
        owners = {name.rpartition(".")[0] for name in bad}
        for module, shape, _ in reversed(self._outputs):
            sums = self._gradients.get(module, ())
            if module in owners or not all(value.isfinite() for value in sums):
                return Origin(module, shape, is_forward=False)
        return None


def _sum(x: Tensor) -> Tensor:
    return x.detach().sum(dtype=torch.float32)


def as_told(found: Origin) -> dict[str, Any]:
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
