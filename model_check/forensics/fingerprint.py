"""Fingerprints of tensors on their device; the formula is that of utils.fingerprint."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from model_check.utils.fingerprint import NUM_COLUMNS, column_weight, row_weight

_BITS = {4: torch.int32, 2: torch.int16, 8: torch.int64}
"""Bytes of a value -> how its bits are read."""
_CHUNK_ROWS = {"cpu": 32, "cuda": 8192}
"""Of int64: so many stay in a CPU's cache, or are worth the launches on a GPU."""


class NoKernelError(Exception):
    """A faster kernel cannot be had here; the text says why."""


class Fingerprint(Protocol):
    def __call__(
        self, tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None
    ) -> Tensor:
        """int64 [len(tensors)], on their device, without a wait for it. `first_rows`: the number of
        each tensor's first row, for a part of a larger one; None: 0."""


def eager_fingerprint(tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None) -> Tensor:
    """By torch's own operators, on any device: slow, and what the others are compared with."""
    rows = first_rows or [0] * len(tensors)
    sums = [_sum_of(x, first) for x, first in zip(tensors, rows, strict=True)]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def num_rows(tensor: Tensor) -> int:
    return -(-tensor.numel() // NUM_COLUMNS)


def _sum_of(tensor: Tensor, first_row: int) -> Tensor:
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = columns_on(tensor.device)
    rows = _CHUNK_ROWS.get(tensor.device.type, 32)
    for number, chunk in enumerate(torch.split(bits, rows * NUM_COLUMNS)):
        padded = torch.zeros(num_rows(chunk) * NUM_COLUMNS, dtype=torch.int64, device=bits.device)
        padded[: chunk.numel()] = chunk
        sums = (padded.view(-1, NUM_COLUMNS) * weights).sum(1)
        first = first_row + number * rows
        total = total + (sums * _rows(first, len(sums), tensor.device)).sum()
    return total


@cache
def columns_on(device: torch.device) -> Tensor:
    return as_int64([column_weight(c) for c in range(NUM_COLUMNS)]).to(device)


@lru_cache(1024)
def _rows(first: int, count: int, device: torch.device) -> Tensor:
    return as_int64([row_weight(first + r) for r in range(count)]).to(device)


def as_int64(weights: Sequence[int]) -> Tensor:
    """Unsigned numbers of 64 bits, as torch reads them."""
    return torch.tensor([w - (1 << 64) if w >= 1 << 63 else w for w in weights])


def sent(table: Tensor, device: torch.device) -> Tensor:
    """To the device, without a wait for it."""
    pinned = table.pin_memory() if device.type == "cuda" else table
    return pinned.to(device, non_blocking=True)
