"""Matrix products in 16 bits: in which dtype they are computed, and how they are summed."""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with `x`: autocast's where it is on, otherwise that of `x`."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):  # the meta device knows no autocast
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products of exactly the dtypes that are given, on the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def add_product(
    total_VE: Tensor | None, logits_grad_VN: Tensor, hidden_NE: Tensor, dtype: torch.dtype
) -> Tensor:
    """total + logits_grad @ hidden in `dtype`, in place; by one kernel where there is one."""
    factors = logits_grad_VN, hidden_NE
    if hidden_NE.dtype != dtype and adds_in_float32(hidden_NE.device, hidden_NE.dtype):
        if total_VE is None:
            return torch.mm(*factors, out_dtype=torch.float32)
        return torch.addmm(total_VE, *factors, out_dtype=torch.float32, out=total_VE)
    if total_VE is None:
        return (logits_grad_VN @ hidden_NE).to(dtype)
    if hidden_NE.dtype == dtype:
        return total_VE.addmm_(*factors)
    return total_VE.add_(logits_grad_VN @ hidden_NE)


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit matrices is added to a float32 sum by one kernel, unrounded.
    torch has one on GPUs alone, from 2.12 on. The first call waits for the device. Raises
    torch.OutOfMemoryError, torch.AcceleratorError."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        # In 16 bits the sum would be another.
        total = torch.full((16, 16), 4097.0, device=device)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        fresh = torch.mm(ones, ones, out_dtype=torch.float32)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return bool((total == 4097.0 + 16).all() & (fresh == 16).all())
