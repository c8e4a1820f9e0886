"""The language model's head and its cross entropy in one, a chunk of rows at a time.

With a vocabulary of 128256, float32 logits of 8192 tokens and what autograd keeps of them would
take 12 to 17 GB. Here each chunk's gradients are computed as soon as its logits exist, so only one
chunk's logits are alive, and nothing is computed twice.

Shapes: N rows (tokens), H hidden width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""A target that counts for nothing."""

CHUNK_ROWS = 2048
# Each chunk adds a [V, H] product to the weight's gradient: below 2048 rows that traffic dominates
# (256 rows at H 4096, V 128256: 32 passes over 2 GB for each 8192 tokens).


def linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk_rows: int = CHUNK_ROWS
) -> Tensor:
    """Summed cross entropy of `hidden @ weight.T` against `targets`, a float32 scalar (float64 for
    float64 inputs).

    Products are in autocast's dtype where it is on; softmax and accumulation are in float32.
    """
    device = hidden_NH.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else weight_VH.dtype
    with torch.autocast(device, enabled=False):
        total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_NH, weight_VH, targets_N, dtype, chunk_rows
        )
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        dtype: torch.dtype,
        chunk_rows: int,
    ) -> Tensor:
        weight = weight_VH.to(dtype)
        total, hidden_grads, weight_grad = None, [], None
        rows = torch.split(hidden_NH, chunk_rows), torch.split(targets_N, chunk_rows)
        chunks = zip(*rows, strict=True)
        for hidden, targets in ((h.to(dtype), t) for h, t in chunks):
            loss, logits_grad = _loss_and_gradient(hidden @ weight.T, targets)
            total = loss if total is None else total + loss
            if any(ctx.needs_input_grad):
                hidden_grads.append(logits_grad @ weight)
                part = (logits_grad.T @ hidden).to(weight_VH.dtype)
                weight_grad = part if weight_grad is None else weight_grad.add_(part)
        if hidden_grads:
            ctx.hidden_grad = torch.cat(hidden_grads).to(hidden_NH.dtype)
            ctx.weight_grad = weight_grad
        assert total is not None, "a batch has rows"
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad = ctx.hidden_grad.mul_(total_grad)
        weight_grad = ctx.weight_grad.mul_(total_grad)
        ctx.hidden_grad = ctx.weight_grad = None  # scaled in place: this graph is spent
        return hidden_grad, weight_grad, None, None, None


def _loss_and_gradient(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk and its gradient by the logits, in the logits' dtype."""
    with torch.enable_grad():
        leaf = logits_NV.detach().requires_grad_()
        exact = leaf if leaf.dtype == torch.float64 else leaf.float()
        loss = F.cross_entropy(exact, targets_N, ignore_index=IGNORED, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient
