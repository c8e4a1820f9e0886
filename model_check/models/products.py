"""Matrix products in float32 on a CPU, by the faster of the two libraries that torch brings along.

torch asks MKL for them, which leaves AVX-512 alone on CPUs that are not Intel's. oneDNN, which
torch asks for 16-bit products, uses it on all (AMD EPYC of family 26, one thread, [1024, 256] by
[256, 688]: 99 GFLOP/s and 219). Both add in float32. All else is torch's own choice: GPUs, 16-bit
products, compiled blocks.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, with gradients; x [..., width]."""
    if not by_onednn(x) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight)
    out: Tensor = OneDnnLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices, without gradients."""
    return onednn_product(a, b) if by_onednn(a) else a @ b


def by_onednn(x: Tensor) -> bool:
    """Whether products of `x` are oneDNN's."""
    float32_on_cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    return float32_on_cpu and not torch.compiler.is_compiling() and _onednn_is_faster()


class OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_wanted, weight_wanted = ctx.needs_input_grad
        x_grad = onednn_product(out_grad, weight) if x_wanted else None
        if not weight_wanted:
            return x_grad, None
        return x_grad, onednn_product(out_grad.flatten(0, -2).T, x.flatten(0, -2))


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., K] @ b [K, N]. `a` is copied unless it is contiguous; `b` may be transposed at no
    cost."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return out


@cache
def _onednn_is_faster() -> bool:
    """On AMD's CPUs with AVX-512; on others it was not measured. ATEN_CPU_CAPABILITY=avx2 in the
    environment makes it False, and so does a torch without this operator, which is private."""
    return (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    )
