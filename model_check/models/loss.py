"""The language model's head and its cross entropy in one, a chunk of rows at a time.

With a vocabulary of 128256, float32 logits of 8192 tokens and what autograd keeps of them would
take 12 to 17 GB. Here each chunk's gradients are computed as soon as its logits exist: only one
chunk's logits exist at a time, and nothing is computed twice.

Shapes: N rows (tokens), H hidden width, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The target of a position that does not count."""
ChunkLoss = Callable[[Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""As `loss_and_gradient`."""


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
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    chunk_rows: int,
    expected_grad: Tensor | None = None,
    chunk_loss: ChunkLoss | None = None,
    *,
    adds_in_float32: bool = False,
) -> Tensor:
    """Summed cross entropy of `hidden @ weight.T` against `targets`, a float32 scalar (float64 for
    float64 inputs).

    Products are in autocast's dtype where it is on; softmax and accumulation are in float32.
    `chunk_rows`: see model_check.config.derived.loss_chunk_rows. `chunk_loss`: compiled code of
    loss_and_gradient. `adds_in_float32`: see can_add_in_float32.

    `expected_grad`: what backward will be called with. 16-bit gradients are multiplied by it where
    they are rounded, and backward has nothing left to do; not by eager code of a CPU, where it
    costs more than it saves. Another gradient is right, too, and takes a pass.

    A second backward pass through the result raises RuntimeError.
    """
    dtype = compute_dtype(weight_VH)
    # A parameter asks for its gradient even where gradients are off.
    if not torch.is_grad_enabled():
        weight_VH = weight_VH.detach()
    is_eager = chunk_loss is None and not torch.compiler.is_compiling()
    if dtype == weight_VH.dtype or (is_eager and hidden_NH.device.type == "cpu"):
        expected_grad = None
    way = _Way(dtype, chunk_rows, adds_in_float32, chunk_loss or loss_and_gradient)
    with without_autocast(hidden_NH):
        total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_NH, weight_VH, targets_N, expected_grad, way
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


def root(total: Tensor, grad: Tensor) -> Tensor:
    """`total * grad`, to call backward on, without an argument: `total` gets `grad` itself. (Where
    torch is handed a gradient it imports sympy: 35 MiB and 0.4 s.)"""
    result: Tensor = _Root.apply(total, grad)  # type: ignore[no-untyped-call]
    return result


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return total * grad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _one: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


class _Way(NamedTuple):
    """How the head is computed."""

    dtype: torch.dtype
    """Of its products."""
    chunk_rows: int
    adds_in_float32: bool
    chunk_loss: ChunkLoss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        factor: Tensor | None,
        way: _Way,
    ) -> Tensor:
        with_gradient = any(ctx.needs_input_grad)
        weight = weight_VH.to(way.dtype)
        hidden_grad = torch.empty_like(hidden_NH) if with_gradient else None
        total, weight_grad = None, None
        for start in range(0, len(targets_N), way.chunk_rows):
            rows = slice(start, start + way.chunk_rows)
            hidden, targets = hidden_NH[rows].to(way.dtype), targets_N[rows]
            # No name keeps the logits: eager code frees them before it is done.
            loss, logits_grad = way.chunk_loss(hidden @ weight.T, targets, factor, with_gradient)
            total = loss if total is None else total + loss
            if hidden_grad is not None and logits_grad is not None:
                ignored = (targets == IGNORED)[:, None]  # masked here: H is narrower than V
                hidden_grad[rows] = (logits_grad @ weight).masked_fill_(ignored, 0.0)
                hidden = hidden.masked_fill(ignored, 0.0)
                weight_grad = _add_product(weight_grad, logits_grad, hidden, weight_VH.dtype, way)
        ctx.hidden_grad, ctx.weight_grad, ctx.factor = hidden_grad, weight_grad, factor
        assert total is not None, "a batch has rows"
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad, weight_grad = ctx.hidden_grad, ctx.weight_grad
        if weight_grad is None:
            raise RuntimeError("linear_cross_entropy has no second backward pass: call it again")
        if total_grad is not ctx.factor:  # the very tensor: to compare values would wait for them
            rest = total_grad if ctx.factor is None else total_grad / ctx.factor
            hidden_grad, weight_grad = hidden_grad.mul_(rest), weight_grad.mul_(rest)
        ctx.hidden_grad = ctx.weight_grad = None  # scaled in place: this graph is spent
        return hidden_grad, weight_grad, None, None, None


def loss_and_gradient(
    logits_NV: Tensor, targets_N: Tensor, factor: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one chunk; `with_gradient`: also its gradient by the logits, times `factor`,
    in their dtype. It may take their memory.

    Written out: autograd would keep the log-probabilities, fill a second [N, V] with zeros and
    write a third (one CPU thread, V 8192: the head's step 279 ms with it, 165 ms without).
    """
    exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    log_p_NV = exact.log_softmax(dim=-1)
    del exact
    places_N1 = targets_N.masked_fill(targets_N == IGNORED, 0)[:, None]
    # Not by the index, which counts a negative label from the end.
    chosen_N = log_p_NV.gather(1, places_N1)[:, 0]
    loss = -chosen_N.masked_fill(targets_N == IGNORED, 0.0).sum()
    if not with_gradient:
        return loss, None
    if torch.compiler.is_compiling():  # one kernel, with nothing but the logits in memory
        vocabulary = torch.arange(logits_NV.shape[1], device=logits_NV.device)
        gradient_NV = log_p_NV.exp() - (vocabulary == places_N1).to(log_p_NV.dtype)
        return loss, logits_NV.copy_(gradient_NV if factor is None else gradient_NV * factor)
    rows = torch.arange(len(targets_N), device=targets_N.device)
    minus_one = torch.full_like(log_p_NV[0, :1], -1.0)
    gradient_NV = log_p_NV.exp_().index_put_((rows, places_N1[:, 0]), minus_one, accumulate=True)
    if factor is not None:
        return loss, torch.mul(gradient_NV, factor, out=logits_NV)  # one kernel, which also rounds
    return loss, gradient_NV.to(logits_NV.dtype)


def _add_product(
    total_VH: Tensor | None,
    logits_grad_NV: Tensor,
    hidden_NH: Tensor,
    dtype: torch.dtype,
    way: _Way,
) -> Tensor:
    """total + logits_grad.T @ hidden in `dtype`, in place; one kernel where there is one."""
    factors = logits_grad_NV.T, hidden_NH
    if way.adds_in_float32:
        if total_VH is None:
            return torch.mm(*factors, out_dtype=torch.float32)
        return torch.addmm(total_VH, *factors, out_dtype=torch.float32, out=total_VH)
    if total_VH is None:
        return (factors[0] @ factors[1]).to(dtype)
    if logits_grad_NV.dtype == dtype:
        return total_VH.addmm_(*factors)
    return total_VH.add_(factors[0] @ factors[1])


def can_add_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit matrices is added to a float32 sum by one kernel, unrounded.
    torch has one on GPUs alone, from 2.12 on. Waits for the device once. Raises
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
