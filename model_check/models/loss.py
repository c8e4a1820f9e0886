"""The language model's head and its cross entropy in one, a chunk of rows at a time.

With a vocabulary of 128256, float32 logits of 8192 tokens and what autograd keeps of them would
take 12 to 17 GB. Here each chunk's gradients are computed as soon as its logits exist: only one
chunk's logits exist at a time, and nothing is computed twice.

Shapes: N rows (tokens), H hidden width, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The target of a position that does not count."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with `x` here: autocast's where it is on, else that of `x`."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):  # the meta device knows no autocast
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products of exactly the dtypes that are given, on the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk_rows: int
) -> Tensor:
    """Summed cross entropy of `hidden @ weight.T` against `targets`, a float32 scalar (float64 for
    float64 inputs).

    Products are in autocast's dtype where it is on; softmax and accumulation are in float32.
    `chunk_rows`: see model_check.config.derived.loss_chunk_rows.
    """
    dtype = compute_dtype(weight_VH)
    # A parameter asks for its gradient even where gradients are off.
    if not torch.is_grad_enabled():
        weight_VH = weight_VH.detach()
    with without_autocast(hidden_NH):
        total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_NH, weight_VH, targets_N, dtype, chunk_rows
        )
    return total


@torch.no_grad()
def are_likeliest(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk_rows: int
) -> Tensor:
    """bool [N]: whether each target is the likeliest token, as greedy decoding picks it: by
    products in the weight's dtype, since 16 bits tie. False where the target does not count."""
    found_N = torch.zeros_like(targets_N, dtype=torch.bool)
    with without_autocast(hidden_NH):
        for places in torch.split((targets_N != IGNORED).nonzero()[:, 0], chunk_rows):
            logits = nn.functional.linear(hidden_NH[places].to(weight_VH.dtype), weight_VH)
            found_N[places] = logits.argmax(-1) == targets_N[places]
    return found_N


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
        with_gradient = any(ctx.needs_input_grad)
        weight = weight_VH.to(dtype)
        hidden_grad = torch.empty_like(hidden_NH) if with_gradient else None
        total, weight_grad = None, None
        for start in range(0, len(targets_N), chunk_rows):
            rows = slice(start, start + chunk_rows)
            hidden, targets = hidden_NH[rows].to(dtype), targets_N[rows]
            loss, logits_grad = _loss_and_gradient(hidden @ weight.T, targets, with_gradient)
            total = loss if total is None else total + loss
            if hidden_grad is not None and logits_grad is not None:
                ignored = (targets == IGNORED)[:, None]  # masked here: H is narrower than V
                hidden_grad[rows] = (logits_grad @ weight).masked_fill_(ignored, 0.0)
                hidden = hidden.masked_fill(ignored, 0.0)
                weight_grad = _add_product(weight_grad, logits_grad, hidden, weight_VH.dtype)
        ctx.hidden_grad, ctx.weight_grad = hidden_grad, weight_grad
        assert total is not None, "a batch has rows"
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad = ctx.hidden_grad.mul_(total_grad)
        weight_grad = ctx.weight_grad.mul_(total_grad)
        ctx.hidden_grad = ctx.weight_grad = None  # scaled in place: this graph is spent
        return hidden_grad, weight_grad, None, None, None


def _loss_and_gradient(
    logits_NV: Tensor, targets_N: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one chunk; `with_gradient`: also its gradient by the logits, in their dtype.

    Written out: autograd would keep the log-probabilities, fill a second [N, V] with zeros and
    write a third (one CPU thread, V 8192: the head's step 279 ms with it, 165 ms without).
    """
    exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    log_p_NV = exact.log_softmax(dim=-1)
    del exact
    places_N = targets_N.masked_fill(targets_N == IGNORED, 0)
    index = torch.arange(len(targets_N), device=targets_N.device), places_N
    # Not by the index, which counts a negative label from the end.
    chosen_N = log_p_NV.gather(1, places_N[:, None])[:, 0]
    loss = -chosen_N.masked_fill(targets_N == IGNORED, 0.0).sum()
    if not with_gradient:
        return loss, None
    minus_one = torch.full_like(log_p_NV[0, :1], -1.0)
    gradient_NV = log_p_NV.exp_().index_put_(index, minus_one, accumulate=True)
    return loss, gradient_NV.to(logits_NV.dtype)


def _add_product(
    total_VH: Tensor | None, logits_grad_NV: Tensor, hidden_NH: Tensor, dtype: torch.dtype
) -> Tensor:
    """total + logits_grad.T @ hidden in `dtype`, in place; one kernel if the dtypes are equal."""
    if total_VH is None:
        return (logits_grad_NV.T @ hidden_NH).to(dtype)
    if logits_grad_NV.dtype == dtype:
        return total_VH.addmm_(logits_grad_NV.T, hidden_NH)
    return total_VH.add_(logits_grad_NV.T @ hidden_NH)
