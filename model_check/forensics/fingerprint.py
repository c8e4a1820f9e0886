"""Fingerprints of tensors on their device, and which kernel computes them there; the formula is
that of utils.fingerprint. torch's own operators are here; each faster kernel has a file of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from model_check.utils.fingerprint import NUM_COLUMNS, column_weight, row_weight
from model_check.utils.words import first_line

_BITS = {4: torch.int32, 2: torch.int16, 8: torch.int64}
"""Bytes of a value -> how its bits are read."""
_CHUNK_ROWS = {"cpu": 32, "cuda": 8192}
"""Of int64: so many stay in a CPU's cache, or are worth the launches on a GPU."""
_NUM_TRIED = 300 * NUM_COLUMNS + 7
"""Values: more than the threads of a CPU or the programs of a GPU share, and an odd end."""


class NoKernelError(Exception):
    """A faster kernel cannot be had here; the text says why."""


class Fingerprint(Protocol):
    def __call__(
        self, tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None
    ) -> Tensor:
        """Returns int64 [len(tensors)], on their device, without a wait for it. `tensors`: any
        shape, on one device. `first_rows`: the number of each tensor's first row, for a part of a
        larger one; None: 0. Raises TypeError as width_of."""


@dataclass(frozen=True)
class Kernel:
    """A Fingerprint, which it is, and why it is not a faster one ("": it is the fastest)."""

    name: Literal["c", "triton", "eager"]
    compute: Fingerprint
    obstacle: str = ""

    def __call__(
        self, tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None
    ) -> Tensor:
        return self.compute(tensors, first_rows)


def fingerprint_for(device: torch.device) -> Kernel:
    """The fastest that can be had here and gives the sums of torch's own operators; these, where
    none can. For the start of a worker: the first call compiles, and waits for the device."""
    try:
        return _fast(device)
    except NoKernelError as error:
        return Kernel("eager", eager_fingerprint, str(error))


@cache
def _fast(device: torch.device) -> Kernel:
    """One for all trainers of this process. Raises NoKernelError."""
    return _triton(device) if device.type == "cuda" else _c(device)


def _c(device: torch.device) -> Kernel:
    from model_check.forensics.fingerprint_c import c_fingerprint

    if device.type != "cpu":
        raise NoKernelError(f"there is no faster kernel for {device.type}")
    compiled = c_fingerprint()
    kernel = Kernel("c", compiled)
    _refuse_other_sums(kernel, device)
    compiled.keep()
    return kernel


def _triton(device: torch.device) -> Kernel:
    try:
        from model_check.forensics.fingerprint_triton import triton_fingerprint
    except ImportError as error:
        raise NoKernelError(f"Triton cannot be imported: {first_line(error)}") from error
    kernel = Kernel("triton", triton_fingerprint)
    _refuse_other_sums(kernel, device)
    return kernel


def _refuse_other_sums(kernel: Kernel, device: torch.device) -> None:
    """A compiler can be wrong, too. Without a random number: these belong to the training."""
    bits = torch.arange(_NUM_TRIED, device=device) * 0x9E3779B97F4A7C1 >> 7
    tensors = [bits.to(torch.int16), bits.to(torch.int32), bits]
    try:
        sums = kernel(tensors, [0, 1, 2])
    except Exception as error:  # Triton's compiler, the machine's, the driver: anything
        raise NoKernelError(f"the kernel ({kernel.name}) fails: {first_line(error)}") from error
    if not torch.equal(sums, eager_fingerprint(tensors, [0, 1, 2])):
        raise NoKernelError(f"the kernel ({kernel.name}) gives other sums than torch")


def eager_fingerprint(tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None) -> Tensor:
    """Computes a Fingerprint, int64 [len(tensors)], by torch's own operators, on any device: slow,
    and the others are compared with it."""
    rows = first_rows or [0] * len(tensors)
    sums = [_sum_of(x, first) for x, first in zip(tensors, rows, strict=True)]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def is_plain(tensor: Tensor) -> bool:
    """Returns whether its values, of any shape and dtype, lie where it says: it is not sparse, and
    no class of a person's own, which may be a shell around other tensors."""
    is_torchs = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return is_torchs and tensor.layout is torch.strided and not tensor.is_meta


def has_fingerprint(tensor: Tensor) -> bool:
    """Returns whether it is plain, of any shape, and its values have 2, 4 or 8 bytes."""
    return is_plain(tensor) and tensor.element_size() in _BITS


def width_of(tensor: Tensor) -> int:
    """Returns the bytes of a value, whatever the shape: 2, 4 or 8. Raises TypeError for any other
    dtype: the formula has no such width, and the C kernel would read beyond the tensor."""
    width = tensor.element_size()
    if width not in _BITS:
        raise TypeError(f"no fingerprint of {tensor.dtype}: values of 2, 4 or 8 bytes have one")
    return width


def num_rows(tensor: Tensor) -> int:
    """Returns how many rows of NUM_COLUMNS its values fill, whatever the shape."""
    return -(-tensor.numel() // NUM_COLUMNS)


def _sum_of(tensor: Tensor, first_row: int) -> Tensor:
    bits = tensor.detach().contiguous().view(_BITS[width_of(tensor)]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
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
    """Returns the weights of the columns, int64 [NUM_COLUMNS]; kept, so not to be changed."""
    return as_int64([column_weight(c) for c in range(NUM_COLUMNS)]).to(device)


@lru_cache(1024)
def _rows(first: int, count: int, device: torch.device) -> Tensor:
    return as_int64([row_weight(first + r) for r in range(count)]).to(device)


def as_int64(weights: Sequence[int]) -> Tensor:
    """Returns unsigned numbers of 64 bits, one at least, as torch reads them: int64
    [len(weights)]."""
    return torch.tensor([w - (1 << 64) if w >= 1 << 63 else w for w in weights])


def sent(table: Tensor, device: torch.device) -> Tensor:
    """Returns `table` (any shape and dtype, on the CPU) on the device, without a wait for it."""
    pinned = table.pin_memory() if device.type == "cuda" else table
    return pinned.to(device, non_blocking=True)
