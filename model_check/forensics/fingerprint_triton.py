"""Fingerprints on a CUDA GPU: one launch for all tensors of a width, which reads each value once.

Triton comes with torch's builds for CUDA. It needs a C compiler when it first starts a kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_check.forensics.fingerprint import columns_on, sent, width_of
from model_check.utils.fingerprint import NUM_COLUMNS

_ROWS = 16
"""Of a program: 64 KiB of fp32, and one atomic addition for them."""
_NUM_WARPS = 8
_BITS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Bytes of a value -> how its bits are read."""
_NUM_KEPT = 1024
"""Tables that are kept: the optimizer's tensors stay where they are, others may move."""


def triton_fingerprint(
    tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None
) -> Tensor:
    """Computes a Fingerprint, int64 [len(tensors)], of one tensor at least. Integers add up the
    same in any order, so the order of its atomic additions does not matter."""
    held = [x if x.is_contiguous() else x.contiguous() for x in tensors]
    sums = torch.zeros(len(held), dtype=torch.int64, device=held[0].device)
    rows = first_rows or [0] * len(held)
    parts = [
        (width_of(x), (x.data_ptr(), x.numel(), row, number))
        for number, (x, row) in enumerate(zip(held, rows, strict=True))
        if x.numel()
    ]
    for width in sorted({width for width, _ in parts}):
        _add(sums, width, tuple(part for own, part in parts if own == width))
    return sums


_Part = tuple[int, int, int, int]
"""A tensor: its address, how many values, its first row, where its sum goes."""


def _add(sums: Tensor, width: int, parts: tuple[_Part, ...]) -> None:
    programs = _programs(tuple(num_values for _, num_values, _, _ in parts), sums.device)
    if not len(programs):  # they are empty
        return
    _kernel[(len(programs),)](
        _table(parts, sums.device),
        programs,
        columns_on(sums.device),
        sums,
        BITS=_BITS[width],
        ROWS=_ROWS,
        NUM_COLUMNS=NUM_COLUMNS,
        num_warps=_NUM_WARPS,
    )


@lru_cache(_NUM_KEPT)
def _table(parts: tuple[_Part, ...], device: torch.device) -> Tensor:
    return sent(torch.tensor(parts), device)


@lru_cache(_NUM_KEPT)
def _programs(nums_values: tuple[int, ...], device: torch.device) -> Tensor:
    """[programs, 2]: a program's tensor, and its first row in it."""
    per_program = _ROWS * NUM_COLUMNS
    counts = torch.tensor([-(-num // per_program) for num in nums_values])
    tensors = torch.arange(len(counts)).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[tensors]
    rows = (torch.arange(len(tensors)) - before) * _ROWS
    return sent(torch.stack([tensors, rows], 1), device)


@triton.jit
def _row_weight(row, NUM_COLUMNS: tl.constexpr):
    z = (row + NUM_COLUMNS + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64)


@triton.jit
def _kernel(
    table,
    programs,
    columns,
    sums,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    program = programs + 2 * tl.program_id(0)
    tensor = table + 4 * tl.load(program)
    row = tl.load(program + 1)
    values = tl.load(tensor).to(tl.pointer_type(BITS))
    num_values = tl.load(tensor + 1)
    first_row = tl.load(tensor + 2) + row
    column = tl.arange(0, NUM_COLUMNS)
    of_columns = tl.zeros([NUM_COLUMNS], dtype=tl.int64)
    for r in tl.static_range(ROWS):
        at = (row + r) * NUM_COLUMNS + column
        bits = tl.load(values + at, mask=at < num_values, other=0)
        of_columns += bits.to(tl.int64) * _row_weight(first_row + r, NUM_COLUMNS)
    total = tl.sum(of_columns * tl.load(columns + column))
    tl.atomic_add(sums + tl.load(tensor + 3), total, sem="relaxed")
