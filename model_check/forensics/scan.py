"""Which tensors hold NaN or Inf, and how many. It reads whole tensors: only an alarm uses it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

NUM_SHOWN = 5


@dataclass(frozen=True)
class BadTensor:
    """A tensor that is not finite everywhere."""

    name: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    first_values: tuple[float, ...]
    """The first NUM_SHOWN in memory order."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def bad_gradients(model: nn.Module) -> list[BadTensor]:
    """In model order."""
    return bad_tensors((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)


def bad_parameters(model: nn.Module) -> list[BadTensor]:
    return bad_tensors((name, p.detach()) for name, p in model.named_parameters())


def bad_tensors(named: Iterable[tuple[str, Tensor]]) -> list[BadTensor]:
    return [_counted(name, tensor) for name, tensor in named if not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    """A sum with NaN or Inf is not finite, and 30 times quicker (35 GB/s on a CPU); one that is not
    finite may also have overflowed."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())  # sync


def _counted(name: str, tensor: Tensor) -> BadTensor:
    return BadTensor(
        name=name,
        shape=tuple(tensor.shape),
        num_nan=int(tensor.isnan().sum()),  # sync
        num_inf=int(tensor.isinf().sum()),  # sync
        first_values=tuple(tensor.flatten()[:NUM_SHOWN].tolist()),  # sync
    )
