"""Chooses what computes fingerprints on a device, and says why."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from model_check.forensics.fingerprint import Fingerprint, NoKernelError, eager_fingerprint
from model_check.utils.fingerprint import NUM_COLUMNS
from model_check.utils.words import first_line

_NUM_TRIED = 300 * NUM_COLUMNS + 7
"""Values: more than the threads of a CPU or the programs of a GPU share, and an odd end."""


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
