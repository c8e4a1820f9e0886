"""Attention that never sees all of a long text: causal attention within chunks
(model.attention=local), and Infini-attention, which adds a compressive memory of the chunks before
(Munkhdalai et al., Leave No Context Behind, arXiv 2404.07143; its "segment" is a chunk here).

The memory is in float32 (float64 for float64 inputs): in 16 bits its sums overflow or lose what
they hold.

Shapes: B batch, T time, S chunks of a row, L positions of a chunk, H query heads, G key/value
heads, R = H / G, D width of a head.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model_check.attention import AttentionFn
from model_check.config.derived import attention_span
from model_check.config.schema import Settings
from model_check.model import Attention, AttentionInputs, KVCache, ModelArgs, Rope
from model_check.products import without_autocast

Update = Literal["linear", "delta"]
NO_DOCUMENT = -1
"""The number of a position that only fills up a chunk."""
_EPS = 1e-6
"""Added to divisors."""


class ChunkedAttention(Attention):
    """Causal attention within chunks of a row: nothing crosses their borders, and positions begin
    again in each. To the kernel the chunks are rows of their own."""

    def __init__(self, args: ModelArgs, attend: AttentionFn, chunk_length: int) -> None:
        super().__init__(args, attend)
        self.chunk_length = chunk_length

    @classmethod
    def of(cls, args: ModelArgs, attend: AttentionFn, settings: Settings) -> Attention:
        return cls(args, attend, attention_span(settings))

    def inputs(self, rope: Rope, time: int, documents_BT: Tensor | None) -> AttentionInputs:
        """The chunks are the rows of these inputs, [B * S, ...]."""
        length = min(self.chunk_length, time)
        chunks = None if documents_BT is None else chunked_documents(documents_BT, length)
        return super().inputs(rope, length, chunks)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        batch, _, time, _ = q.shape
        length = inputs.rope.cos.shape[-2]
        q, k, v = (to_chunks(x, length) for x in (q, k, v))
        return from_chunks(self.mix_chunks(q, k, v, inputs, batch), batch, time)

    def mix_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, batch: int
    ) -> Tensor:
        """Mixes the values within each chunk: [B * S, H, L, D] from [B * S, heads, L, D]."""
        return super().mix(q, k, v, inputs)

    def mix_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, rope: Rope) -> Tensor:
        """Returns [B, H, T, D] as Attention.mix_cached does, for T positions of one chunk or more.
        The cache holds the chunk that is not full yet."""
        parts: list[Tensor] = []
        while q.shape[2]:
            num = min(q.shape[2], self.chunk_length - cache.num_tokens)
            (q_now, q), (k_now, k), (v_now, v) = (x.tensor_split((num,), dim=2) for x in (q, k, v))
            parts.append(self.mix_cached_chunk(q_now, k_now, v_now, cache, rope))
            if cache.num_tokens == self.chunk_length:
                self.end_chunk(cache)
        return torch.cat(parts, dim=2)

    def mix_cached_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, rope: Rope
    ) -> Tensor:
        """Does what `mix_cached` does, for positions of one chunk: returns [B, H, T, D]."""
        return super().mix_cached(q, k, v, cache, rope)

    def end_chunk(self, cache: KVCache) -> None:
        cache.num_tokens = 0


class Memory(NamedTuple):
    """What was written so far: the paper's M and z."""

    values: Tensor
    """[..., G, D, D]"""
    weights: Tensor
    """[..., G, D]"""


class MemoryMasks(NamedTuple):
    """Where documents meet the borders of chunks, as masks to multiply by: a difference of sums
    would keep bits of what it takes away."""

    before: Tensor
    """bool [B or 1, S, S]: whether a chunk finds in its memory what an earlier one wrote: that one
    ends in the document with which it begins itself."""
    reads: Tensor
    """bool [B or 1, S, L]: whether a position has a memory: its document began in an earlier
    chunk."""
    writes: Tensor
    """bool [B or 1, S, L]: whether later chunks may remember a position: its document is not over
    at the chunk's end."""
    continues: Tensor
    """bool [B or 1, S]: whether a chunk ends in the document with which it begins."""

    @classmethod
    def of(cls, documents_BSL: Tensor) -> "MemoryMasks":
        """A document is neighbours of equal number. One row of zeros serves a batch without
        documents."""
        first, last = documents_BSL[:, :, 0], documents_BSL[:, :, -1]
        is_same = first[:, :, None] == last[:, None, :]
        is_begun = torch.zeros_like(first, dtype=torch.bool)
        is_begun[:, 1:] = first[:, 1:] == last[:, :-1]
        return cls(
            before=is_same.tril(-1),
            reads=(documents_BSL == first[:, :, None]) & is_begun[:, :, None],
            writes=documents_BSL == last[:, :, None],
            continues=first == last,
        )


@dataclass(frozen=True)
class InfiniInputs(AttentionInputs):
    masks: MemoryMasks


class InfiniCache(KVCache):
    """Keys and values of the chunk that is not full yet, and the memory of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.unrotated = KVCache()
        """Keys without positions, and values."""
        self.memory: Memory | None = None


class InfiniAttention(ChunkedAttention):
    """Chunked attention beside a memory of the earlier chunks, mixed by a gate for each query head
    (equations 4 to 10).

    The memory reads queries and keys without their positions, and before the chunk's own are
    written: otherwise the future would leak. Where it is empty, in a row's or document's first
    chunk, the output is the local one, ungated: with one chunk this is full attention.
    """

    def __init__(
        self, args: ModelArgs, attend: AttentionFn, chunk_length: int, update: Update
    ) -> None:
        super().__init__(args, attend, chunk_length)
        self.update = update
        self.gate = nn.Parameter(torch.empty(args.num_heads))

    @classmethod
    def of(cls, args: ModelArgs, attend: AttentionFn, settings: Settings) -> Attention:
        return cls(args, attend, attention_span(settings), settings.model.infini.update)

    def inputs(self, rope: Rope, time: int, documents_BT: Tensor | None) -> InfiniInputs:
        inputs = super().inputs(rope, time, documents_BT)
        if documents_BT is None:
            documents_BT = torch.zeros(1, time, dtype=torch.int64, device=rope.cos.device)
        chunks = chunked_documents(documents_BT, min(self.chunk_length, time))
        masks = MemoryMasks.of(by_row(chunks, len(documents_BT)))
        return InfiniInputs(inputs.rope, inputs.visible, masks)

    def mix_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, batch: int
    ) -> Tensor:
        local = super().mix_chunks(q, k, v, inputs, batch)
        assert isinstance(inputs, InfiniInputs)
        with without_autocast(q):
            q, k, v = (by_row(x, batch) for x in (q, k, v))
            found = read_all(q, k, v, inputs.masks, self.update)
            reads = inputs.masks.reads[:, :, None, :, None]
            return self._gated(by_row(local, batch), found, reads).flatten(0, 1)

    def new_cache(self) -> InfiniCache:
        return InfiniCache()

    def mix_cached_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, rope: Rope
    ) -> Tensor:
        assert isinstance(cache, InfiniCache)
        cache.unrotated.append(k, v)
        local = super().mix_cached_chunk(q, k, v, cache, rope)
        if cache.memory is None:
            return local
        found = read(q, cache.memory)
        return self._gated(local, found, torch.ones_like(found[..., :1]))

    def end_chunk(self, cache: KVCache) -> None:
        super().end_chunk(cache)
        assert isinstance(cache, InfiniCache)
        keys, values = cache.unrotated.rows
        cache.memory = write(keys, values, cache.memory or empty_memory(keys), self.update)
        cache.unrotated.num_tokens = 0

    def _gated(self, local: Tensor, found: Tensor, reads: Tensor) -> Tensor:
        """Equation 10: sigmoid(gate) of what was found, the rest local; all of it local where
        `reads` is 0. [..., H, L, D]"""
        share = torch.sigmoid(self.gate.to(found.dtype))[:, None, None] * reads
        exact = local.to(found.dtype)
        return (exact + share * (found - exact)).to(local.dtype)


def read_all(q: Tensor, k: Tensor, v: Tensor, masks: MemoryMasks, update: Update) -> Tensor:
    """Returns what every query finds of the chunks before its own, [B, S, H, L, D] in the memory's
    dtype. `q`: [B, S, H, L, D]; `k`, `v`: [B, S, G, L, D], all without positions."""
    keys = feature(k) * masks.writes[:, :, None, :, None]
    before = masks.before.to(keys.dtype).expand(len(k), -1, -1)
    # A product with a triangle of ones is an exclusive sum over chunks. (torch.cumsum of a GPU is
    # not deterministic.)
    weights = torch.einsum("bst,btgd->bsgd", before, keys.sum(3))
    if update == "linear":
        written = keys.transpose(-1, -2) @ v.to(keys.dtype)
        values = torch.einsum("bst,btgde->bsgde", before, written)
    else:
        values = _corrected(keys, v.to(keys.dtype), weights, masks)
    return read(q, Memory(values, weights))


def read(q: Tensor, memory: Memory) -> Tensor:
    """Returns what queries find in one memory, [..., H, L, D] like `q` (equation 7)."""
    queries = feature(q)
    num_groups = memory.weights.shape[-2]
    of_groups = queries.view(*q.shape[:-3], num_groups, -1, *q.shape[-2:])  # [..., G, R, L, D]
    grouped = Memory(memory.values[..., None, :, :], memory.weights[..., None, :])
    return _found(of_groups, grouped).flatten(-4, -3)


def write(k: Tensor, v: Tensor, memory: Memory, update: Update) -> Memory:
    """Returns the memory with one chunk more. `k`, `v`: [..., G, L, D]."""
    return _added(feature(k), v.to(memory.values.dtype), memory, update)


def empty_memory(k: Tensor) -> Memory:
    """Returns a memory of nothing for keys like `k`, [B, G, L, D]."""
    weights = torch.zeros_like(k[:, :, 0], dtype=memory_dtype(k))
    return Memory(weights[..., None].expand(*k.shape[:2], -1, k.shape[3]).clone(), weights)


def feature(x: Tensor) -> Tensor:
    """ELU + 1, always positive. Not elu(x) + 1, which is 0 in float32 from x = -17 on: a divisor
    of zeros."""
    y: Tensor = _Feature.apply(x.to(memory_dtype(x)))  # type: ignore[no-untyped-call]
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


def memory_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a memory of `x`: float32, and float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _found(features: Tensor, memory: Memory) -> Tensor:
    """[..., L, D]: a mean of the values written, weighted by how near their keys are."""
    divisor = features @ memory.weights[..., None]
    return features @ memory.values / (divisor + _EPS)


def _added(features: Tensor, v: Tensor, memory: Memory, update: Update) -> Memory:
    """Equation 8 (linear), or 9 (delta): only what the memory does not give already is written."""
    new = v - _found(features, memory) if update == "delta" else v
    values = memory.values + features.transpose(-1, -2) @ new
    return Memory(values, memory.weights + features.sum(-2))


def _corrected(keys: Tensor, v: Tensor, weights: Tensor, masks: MemoryMasks) -> Tensor:
    """[B, S, G, D, D]: the values that each chunk finds, by the delta rule. `keys`: features of the
    positions that are written, otherwise 0."""
    memory = empty_memory(keys[:, 0])
    found = []
    for number in range(keys.shape[1]):
        if number:
            is_same = masks.before[:, number, number - 1, None, None, None]
            memory = Memory(memory.values * is_same, weights[:, number])
        found.append(memory.values)
        continues = masks.continues[:, number, None, None]
        own = Memory(memory.values * continues[..., None], memory.weights * continues)
        memory = _added(keys[:, number], v[:, number], own, "delta")
    return torch.stack(found, dim=1)


def by_row(x: Tensor, batch: int) -> Tensor:
    """[B * S, ...] -> [B, S, ...]"""
    return x.view(batch, -1, *x.shape[1:])


def to_chunks(x_BHTD: Tensor, length: int) -> Tensor:
    """[B * S, heads, L, D]; the last chunk is filled up with zeros, which no position sees."""
    missing = -x_BHTD.shape[2] % length
    if missing:
        x_BHTD = F.pad(x_BHTD, (0, 0, 0, missing))
    batch, heads, time, width = x_BHTD.shape
    chunks = x_BHTD.reshape(batch, heads, time // length, length, width)
    return chunks.transpose(1, 2).flatten(0, 1)


def from_chunks(x: Tensor, batch: int, time: int) -> Tensor:
    """[B * S, heads, L, D] -> [B, heads, T, D]."""
    return by_row(x, batch).transpose(1, 2).flatten(2, 3)[:, :, :time]


def chunked_documents(documents_BT: Tensor, length: int) -> Tensor:
    """[B * S, L]"""
    missing = -documents_BT.shape[1] % length
    if missing:
        documents_BT = F.pad(documents_BT, (0, missing), value=NO_DOCUMENT)
    return documents_BT.reshape(-1, length)
