"""The memory of Infini-attention: what earlier segments held, in a matrix for each key/value head
(Munkhdalai et al., Leave No Context Behind, arXiv 2404.07143, section 2.1.2).

In float32 (float64 for float64 inputs): in 16 bits the sums overflow or lose what they hold.

Shapes: B batch, S segments, N positions of a segment, H query heads, G key/value heads, R = H / G,
D width of a head.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Update = Literal["linear", "delta"]
_LEAST = 1e-6
"""Added to divisors."""


class Memory(NamedTuple):
    """What was written so far: the paper's M and z."""

    values: Tensor
    """[..., G, D, D]"""
    weights: Tensor
    """[..., G, D]"""


class Spans(NamedTuple):
    """Where documents meet the borders of segments, as masks to multiply by: a difference of sums
    would keep bits of what it takes away."""

    before: Tensor
    """bool [B or 1, S, S]: whether a segment finds in its memory what an earlier one wrote: that
    one ends in the document with which it begins itself."""
    reads: Tensor
    """bool [B or 1, S, N]: whether a position has a memory: its document began in an earlier
    segment."""
    writes: Tensor
    """bool [B or 1, S, N]: whether later segments may remember a position: its document is not over
    at the segment's end."""
    goes_on: Tensor
    """bool [B or 1, S]: whether a segment ends in the document with which it begins."""


def spans(documents_BSN: Tensor) -> Spans:
    """Of neighbours with equal numbers. One row of zeros serves a batch without documents."""
    first, last = documents_BSN[:, :, 0], documents_BSN[:, :, -1]
    is_same = first[:, :, None] == last[:, None, :]
    is_begun = torch.zeros_like(first, dtype=torch.bool)
    is_begun[:, 1:] = first[:, 1:] == last[:, :-1]
    return Spans(
        before=is_same.tril(-1),
        reads=(documents_BSN == first[:, :, None]) & is_begun[:, :, None],
        writes=documents_BSN == last[:, :, None],
        goes_on=first == last,
    )


def read_all(q: Tensor, k: Tensor, v: Tensor, spans: Spans, update: Update) -> Tensor:
    """What every query finds of the segments before its own. `q`: [B, S, H, N, D]; `k`, `v`: [B, S,
    G, N, D], all without positions. Returns [B, S, H, N, D] in the memory's dtype."""
    keys = feature(k) * spans.writes[:, :, None, :, None]
    before = spans.before.to(keys.dtype).expand(len(k), -1, -1)
    # A product with a triangle of ones is an exclusive sum over segments. (torch.cumsum of a GPU
    # is not deterministic.)
    weights = torch.einsum("bst,btgd->bsgd", before, keys.sum(3))
    if update == "linear":
        written = keys.transpose(-1, -2) @ v.to(keys.dtype)
        values = torch.einsum("bst,btgde->bsgde", before, written)
    else:
        values = _corrected(keys, v.to(keys.dtype), weights, spans)
    return read(q, Memory(values, weights))


def read(q: Tensor, memory: Memory) -> Tensor:
    """Equation 7. `q`: [..., H, N, D]; returns the same shape."""
    queries = feature(q)
    num_groups = memory.weights.shape[-2]
    of_groups = queries.view(*q.shape[:-3], num_groups, -1, *q.shape[-2:])  # [..., G, R, N, D]
    grouped = Memory(memory.values[..., None, :, :], memory.weights[..., None, :])
    return _found(of_groups, grouped).flatten(-4, -3)


def write(k: Tensor, v: Tensor, memory: Memory, update: Update) -> Memory:
    """The memory with one segment more. `k`, `v`: [..., G, N, D]."""
    return _added(feature(k), v.to(memory.values.dtype), memory, update)


def empty(k: Tensor) -> Memory:
    """For keys like `k`, [B, G, N, D]."""
    weights = torch.zeros_like(k[:, :, 0], dtype=exact_dtype(k))
    return Memory(weights[..., None].expand(*k.shape[:2], -1, k.shape[3]).clone(), weights)


def feature(x: Tensor) -> Tensor:
    """ELU + 1, always positive. Not elu(x) + 1, which is 0 in float32 from x = -17 on: a divisor
    of zeros."""
    y: Tensor = _Feature.apply(x.to(exact_dtype(x)))  # type: ignore[no-untyped-call]
    return y


class _Feature(torch.autograd.Function):
    """Keeps its result alone: the slope follows from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()  # else the products below would copy, and autograd keep both
        y = torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        slopes: Tensor = gradient * y.clamp(max=1)
        return slopes


def exact_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _found(features: Tensor, memory: Memory) -> Tensor:
    """[..., N, D]: a mean of the values written, weighted by how near their keys are."""
    divisor = features @ memory.weights[..., None]
    return features @ memory.values / (divisor + _LEAST)


def _added(features: Tensor, v: Tensor, memory: Memory, update: Update) -> Memory:
    """Equation 8 (linear), or 9 (delta): only what the memory does not give already is written."""
    new = v - _found(features, memory) if update == "delta" else v
    values = memory.values + features.transpose(-1, -2) @ new
    return Memory(values, memory.weights + features.sum(-2))


def _corrected(keys: Tensor, v: Tensor, weights: Tensor, spans: Spans) -> Tensor:
    """[B, S, G, D, D]: the values that each segment finds, by the delta rule. `keys`: features of
    the positions that are written, else 0."""
    memory = empty(keys[:, 0])
    found = []
    for number in range(keys.shape[1]):
        if number:
            is_same = spans.before[:, number, number - 1, None, None, None]
            memory = Memory(memory.values * is_same, weights[:, number])
        found.append(memory.values)
        goes_on = spans.goes_on[:, number, None, None]
        own = Memory(memory.values * goes_on[..., None], memory.weights * goes_on)
        memory = _added(keys[:, number], v[:, number], own, "delta")
    return torch.stack(found, dim=1)
