"""Fingerprints of parts of a tensor, which add up to that of the whole: a value's weight depends on
its place in the whole tensor, so the sum is the same however many ranks share it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.forensics.fingerprint import Fingerprint
from model_check.utils.fingerprint import NUM_COLUMNS

_MODULUS = 1 << 64


class Part(NamedTuple):
    """Values that follow each other in a larger tensor."""

    values: Tensor
    first: int
    """The place of the first one there."""


@torch.no_grad()
def sums_of(parts: Sequence[Part], kernel: Fingerprint) -> list[int]:
    """One for each part, all on one device."""
    rows = [(number, *row) for number, part in enumerate(parts) for row in _rows(part)]
    sums = [0] * len(parts)
    if not rows:
        return sums
    owners, tensors, first_rows = zip(*rows, strict=True)
    for owner, value in zip(owners, kernel(tensors, first_rows).tolist(), strict=True):  # sync
        sums[owner] = (sums[owner] + value) % _MODULUS
    return sums


def _rows(part: Part) -> Iterator[tuple[Tensor, int]]:
    """Values that begin a row, with its number. One that is begun by another part is filled with
    zeros in front, which weigh nothing."""
    flat = part.values.detach().reshape(-1)
    row, column = divmod(part.first, NUM_COLUMNS)
    if column and flat.numel():
        head = flat[: NUM_COLUMNS - column]
        filled = torch.zeros(column + head.numel(), dtype=flat.dtype, device=flat.device)
        filled[column:] = head
        yield filled, row
        flat, row = flat[head.numel() :], row + 1
    if flat.numel():
        yield flat, row
