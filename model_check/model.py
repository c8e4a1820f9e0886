"""LLaMA in one file, top to bottom: sizes, RMSNorm, rotary embedding, attention with its cache of
keys and values, SwiGLU, blocks, the model, and the chunked cross entropy of its head.

Touvron et al., LLaMA: Open and Efficient Foundation Language Models, arXiv 2302.13971, section 2.2;
grouped-query attention as in LLaMA 2 (arXiv 2307.09288, section 2.2). `init` makes a model from the
settings and gives it its first weights.

Shapes: B batch, T time, E hidden_size, H query heads, G key/value heads (H is a multiple of G), D
width of a head, V vocabulary, N rows (positions of a chunk of the loss).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from msgspec.structs import asdict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from model_check.attention import AttentionFn, attend_cached, visible_within
from model_check.config.schema import RopeScaling, Settings
from model_check.config.shape import Geometry
from model_check.products import add_product, compute_dtype, without_autocast

Observer = Callable[[Tensor], object]
"""Called with activations [B, T, E] that have a gradient later."""
IGNORED = -100
"""The target of a position that does not count."""
CACHE_STRIDE = 256
"""Positions for which a full KVCache makes room at once."""


class ModelArgs(Geometry, frozen=True, kw_only=True):
    """The sizes (num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim,
    vocab_size, tie_word_embeddings: see Geometry), and what else decides the computation."""

    max_seq_len: int
    """Positions that the rotary tables hold."""
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass."""
    loss_chunk_rows: int = 2048
    """Positions whose logits exist at once."""
    compiled_loss_chunk_rows: int = 2048
    """The same, while the loss is compiled code: see config.derived.loss_chunk_rows."""

    @classmethod
    def of(cls, geometry: Geometry, **values: Any) -> Self:
        return cls(**asdict(geometry), **values)


class Linear(nn.Linear):
    """A matrix without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Leaves the weight as allocated: `init` fills every matrix. (torch's own filling takes
        seconds, and on the meta device imports torch._dynamo.)"""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leaves the weight as allocated, as Linear does."""


class RMSNorm(nn.RMSNorm):
    """Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv 1910.07467, equation 4."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, [..., E], normalised, in the wider type of `x` and the weight: a sharded
        block has a weight of 16 bits, and torch's fused kernels take two types that are equal."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, x.dtype))
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Rope(NamedTuple):
    """Tables of the rotary position embedding (Su et al., RoFormer, arXiv 2104.09864, section
    3.4.2), float32 [T, D]. Hugging Face's layout: a head's first half rotates against its second.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, args: ModelArgs) -> Self:
        """Makes the tables of positions 0 to max_seq_len - 1, on the CPU and bit for bit as
        transformers does: every device gets the same bits."""
        positions = torch.arange(args.max_seq_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, rope_frequencies(args))
        angles = torch.cat((angles, angles), dim=-1)
        return cls(angles.cos(), angles.sin())

    def rows(self, start: int, num: int) -> "Rope":
        """Returns `num` rows from position `start` on. Raises ValueError beyond the tables."""
        if start + num > len(self.cos):
            raise ValueError(f"the rotary tables end with the context, {len(self.cos)} tokens")
        return Rope(self.cos[start : start + num], self.sin[start : start + num])


def rope_frequencies(args: ModelArgs) -> Tensor:
    """Returns the angle per position of each pair, in radians, float32 [D / 2]."""
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.int64, device="cpu").float()
    frequencies = 1.0 / args.rope_theta ** (exponents / args.head_dim)
    scaling = args.rope_scaling
    if scaling is None:
        return frequencies
    # Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_context_length
    wavelengths = 2 * math.pi / frequencies
    kept = (original / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    short_kept = torch.where(wavelengths < original / high, frequencies, blended)
    return torch.where(wavelengths > original / low, frequencies / scaling.factor, short_kept)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotates each pair by the angle of its position, in the tables' precision; the dtype of `x`
    stays."""
    first, second = x_BHTD.chunk(2, dim=-1)
    rotated_half = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos_TD + rotated_half * sin_TD).to(x_BHTD.dtype)


def positions_within(documents_BT: Tensor) -> Tensor:
    """Counts each position from the start of its document, int64 [B, T]."""
    positions_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_BT = torch.where(begins_BT, positions_T, 0).cummax(dim=1).values
    return positions_T - starts_BT


@dataclass(frozen=True)
class AttentionInputs:
    """What the attention of all blocks reads of a batch beside the activations."""

    rope: Rope
    """[T, D]; where documents are masked [B, 1, T, D]."""
    visible: Tensor | None
    """bool [B, 1, T, T], which position sees which; None means every earlier one."""


class KVCache:
    """Keys and values of the positions that a block has read, to which it appends."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._room: Tensor | None = None

    def append(self, *rows_BGTD: Tensor) -> tuple[Tensor, ...]:
        """Appends T positions to each of the tensors, and returns all of them, [B, G, n, D]."""
        new = torch.stack(rows_BGTD)
        end = self.num_tokens + new.shape[3]
        if self._room is None or self._room.shape[3] < end:
            room = new.new_empty(*new.shape[:3], end + CACHE_STRIDE, new.shape[4])
            if self._room is not None:
                room[:, :, :, : self.num_tokens] = self._room[:, :, :, : self.num_tokens]
            self._room = room
        self._room[:, :, :, self.num_tokens : end] = new
        self.num_tokens = end
        return self.rows

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Returns all that was appended, live views, [B, G, n, D] each."""
        assert self._room is not None, "nothing was appended"
        return self._room[:, :, :, : self.num_tokens].unbind()


class Attention(nn.Module):
    """Causal grouped-query attention: several query heads share a key and a value head (Ainslie et
    al., GQA, arXiv 2305.13245, section 2.2).

    Another kind of attention overrides what differs: the inputs that blocks share, which positions
    are mixed, and what is kept of a text that is read piece by piece.
    """

    def __init__(self, args: ModelArgs, attend: AttentionFn) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.attend = attend
        self.wq = Linear(args.hidden_size, args.query_width)
        self.wk = Linear(args.hidden_size, args.key_width)
        self.wv = Linear(args.hidden_size, args.key_width)
        self.wo = Linear(args.query_width, args.hidden_size)

    @classmethod
    def of(cls, args: ModelArgs, attend: AttentionFn, settings: Settings) -> "Attention":
        """One block's attention, as the settings ask for it."""
        return cls(args, attend)

    def inputs(self, rope: Rope, time: int, documents_BT: Tensor | None) -> AttentionInputs:
        """Computes once what all blocks read of a batch of T = `time`. Tokens of one document are
        neighbours of equal number: positions begin again with each document, and its tokens see
        each other alone."""
        if documents_BT is None:
            return AttentionInputs(rope.rows(0, time), None)
        positions = positions_within(documents_BT)[:, None]
        tables = Rope(rope.cos[positions], rope.sin[positions])
        return AttentionInputs(tables, visible_within(documents_BT))

    def forward(self, x_BTE: Tensor, inputs: AttentionInputs) -> Tensor:
        """[B, T, E]"""
        x_BTE = x_BTE.to(compute_dtype(x_BTE))  # autocast would keep a copy for each matrix
        out_BHTD = self.mix(*self._heads(x_BTE), inputs)
        out_BTE: Tensor = self.wo(out_BHTD.transpose(1, 2).flatten(2))
        return out_BTE

    def mix(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """Mixes the values: [B, H, T, D] from queries [B, H, T, D] and keys and values
        [B, G, T, D], none of them rotated yet."""
        return self.attend(rotate(q, *inputs.rope), rotate(k, *inputs.rope), v, inputs.visible)

    def new_cache(self) -> KVCache:
        return KVCache()

    def decode(self, x_BTE: Tensor, cache: KVCache, rope: Rope) -> Tensor:
        """Appends T positions to `cache` and returns their output, [B, T, E]. Raises ValueError
        where the rotary tables end."""
        out_BHTD = self.mix_cached(*self._heads(x_BTE), cache, rope)
        out_BTE: Tensor = self.wo(out_BHTD.transpose(1, 2).flatten(2))
        return out_BTE

    def mix_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, rope: Rope) -> Tensor:
        """Does what `mix` does for the next T positions alone, and appends them to `cache`: returns
        [B, H, T, D]. Raises ValueError where the rotary tables end."""
        rotated = rotate(torch.cat((q, k), dim=1), *rope.rows(cache.num_tokens, q.shape[2]))
        q, k = rotated.tensor_split((q.shape[1],), dim=1)
        return attend_cached(q, *cache.append(k, v))

    def _heads(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (w(x_BTE).unflatten(2, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202,
    section 2)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = Linear(args.hidden_size, args.intermediate_size)
        self.w2 = Linear(args.intermediate_size, args.hidden_size)
        self.w3 = Linear(args.hidden_size, args.intermediate_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        """[B, T, E]"""
        x_BTE = x_BTE.to(compute_dtype(x_BTE))  # as in Attention
        out_BTE: Tensor = self.w2(F.silu(self.w1(x_BTE)) * self.w3(x_BTE))
        return out_BTE


class Block(nn.Module):
    """One layer, with its norms before attention and feed-forward (LLaMA, section 2.2)."""

    def __init__(self, args: ModelArgs, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x_BTE: Tensor, inputs: AttentionInputs) -> Tensor:
        """[B, T, E]"""
        x_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), inputs)
        out_BTE: Tensor = x_BTE + self.feed_forward(self.ffn_norm(x_BTE))
        return out_BTE

    def decode(self, x_BTE: Tensor, cache: KVCache, rope: Rope) -> Tensor:
        """Returns [B, T, E]; see Attention.decode."""
        x_BTE = x_BTE + self.attention.decode(self.attention_norm(x_BTE), cache, rope)
        out_BTE: Tensor = x_BTE + self.feed_forward(self.ffn_norm(x_BTE))
        return out_BTE


class Llama(nn.Module):
    """The whole model. `model(tokens)` gives logits, `model.summed_loss(tokens, targets)` what
    training minimises."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, args: ModelArgs, make_attention: Callable[[], Attention]) -> None:
        """`make_attention` makes the attention of one block. All weights are as allocated."""
        super().__init__()
        self.args = args
        self.tok_embed = Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList(Block(args, make_attention()) for _ in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, eps=args.norm_eps)
        if not args.tie_word_embeddings:
            self.output = Linear(args.hidden_size, args.vocab_size)
        self.loss = ChunkedCrossEntropy(args.loss_chunk_rows, args.compiled_loss_chunk_rows)
        self.set_rope(torch.get_default_device())

    def set_rope(self, device: torch.device) -> None:
        """Computes the rotary tables; a model that was made on device `meta` needs them anew.
        Checkpoints leave them out: they follow from the settings."""
        rope = Rope.of(self.args)
        self.register_buffer("rope_cos", rope.cos.to(device), persistent=False)
        self.register_buffer("rope_sin", rope.sin.to(device), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """[V, E]: the embedding's, where the head is tied."""
        return self.tok_embed.weight if self.args.tie_word_embeddings else self.output.weight

    @property
    def sites(self) -> list[str]:
        """The modules whose outputs `hidden` shows its observers, in turn."""
        return ["tok_embed", *(f"layers.{n}" for n in range(len(self.layers))), "norm"]

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]: position t predicts the token after it.

        `documents`, int64 [B, T]: attention stays among neighbours of equal number, and positions
        start again with each document.
        """
        return F.linear(self.hidden(tokens_BT, documents_BT), self.head_weight)

    def summed_loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        *,
        grad_scale: Tensor | None = None,
        observers: Sequence[Observer] = (),
    ) -> Tensor:
        """Summed cross entropy, a float32 scalar. `targets` are the next tokens already: position t
        is scored against targets[t], unless that is IGNORED.

        `grad_scale`: see ChunkedCrossEntropy. `observers`: see `hidden`.
        """
        hidden_BTE = self.hidden(tokens_BT, documents_BT, observers)
        total: Tensor = self.loss(hidden_BTE, self.head_weight, targets_BT, grad_scale=grad_scale)
        return total

    def loss_and_matches(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the summed loss, and bool [B, T]: whether each target is the likeliest token."""
        hidden_BTE = self.hidden(tokens_BT, documents_BT)
        total: Tensor = self.loss(hidden_BTE, self.head_weight, targets_BT)
        return total, self.loss.argmax_matches(hidden_BTE, self.head_weight, targets_BT)

    def hidden(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        observers: Sequence[Observer] = (),
    ) -> Tensor:
        """Returns what the head reads, [B, T, E]. `observers` are called with what flows between
        blocks: the outputs of `sites`."""
        rope = Rope(self.rope_cos, self.rope_sin)
        inputs = self.layers[0].attention.inputs(rope, tokens_BT.shape[1], documents_BT)  # type: ignore[union-attr,operator]
        x_BTE = _observed(self.tok_embed(tokens_BT), observers)
        for block in self.layers:
            if self.args.gradient_checkpointing and torch.is_grad_enabled():
                # No dropout: no random state to put back for the recomputation.
                x_BTE = checkpoint(
                    block, x_BTE, inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTE = block(x_BTE, inputs)
            _observed(x_BTE, observers)
        return _observed(self.norm(x_BTE), observers)

    def new_caches(self) -> list[KVCache]:
        """Returns empty caches, one per block."""
        return [block.attention.new_cache() for block in self.layers]  # type: ignore[union-attr,operator]

    @torch.no_grad()
    def decode(
        self, tokens_BT: Tensor, caches: Sequence[KVCache], *, only_last: bool = False
    ) -> Tensor:
        """Appends tokens to `caches`, one document per row, and returns their logits [B, T, V];
        `only_last`: those of the last token alone, [B, 1, V]. Raises ValueError where the rotary
        tables end.
        """
        rope = Rope(self.rope_cos, self.rope_sin)
        parts: list[Tensor] = []
        for piece in torch.split(tokens_BT, self.args.max_seq_len, dim=1):  # it bounds memory
            x_BTE = self.tok_embed(piece)
            for block, cache in zip(self.layers, caches, strict=True):
                x_BTE = block.decode(x_BTE, cache, rope)  # type: ignore[operator]
            parts = [*parts, x_BTE] if not only_last else [x_BTE[:, -1:]]
        return F.linear(self.norm(torch.cat(parts, dim=1)), self.head_weight)


class ChunkedCrossEntropy(nn.Module):
    """The head and its summed cross entropy in one, a chunk of rows at a time. It owns no weight: a
    tied head has the embedding's.

    With a vocabulary of 128256, float32 logits of 8192 tokens and what autograd keeps of them would
    take 12 to 17 GB. Here each chunk's gradients are computed as soon as its logits exist: only one
    chunk's logits exist at a time, and nothing is computed twice.
    """

    def __init__(self, chunk_rows: int, compiled_chunk_rows: int) -> None:
        super().__init__()
        self._chunk_rows, self._compiled_chunk_rows = chunk_rows, compiled_chunk_rows

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code stands in for `of_chunk`, as for a module's `forward`."""
        return "of_chunk" in vars(self)

    @property
    def chunk_rows(self) -> int:
        return self._compiled_chunk_rows if self.is_compiled else self._chunk_rows

    def forward(
        self,
        hidden_BTE: Tensor,
        weight_VE: Tensor,
        targets_BT: Tensor,
        *,
        grad_scale: Tensor | None = None,
    ) -> Tensor:
        """Summed cross entropy of `hidden @ weight.T` against `targets`, a float32 scalar (float64
        for float64 inputs). Products are in autocast's dtype where it is on; softmax and sums are
        in float32.

        `grad_scale`: what the caller multiplies the loss by before its backward pass, if that is
        known. Gradients of 16 bits are multiplied by it where they are rounded; not by eager code
        of a CPU, where that costs more than it saves.

        A second backward pass through the result raises RuntimeError.
        """
        dtype = compute_dtype(weight_VE)
        # A parameter asks for its gradient even where gradients are off.
        if not torch.is_grad_enabled():
            weight_VE = weight_VE.detach()
        if dtype == weight_VE.dtype or (not self.is_compiled and hidden_BTE.device.type == "cpu"):
            grad_scale = None
        hidden_NE, targets_N = hidden_BTE.flatten(0, -2), targets_BT.flatten()
        with without_autocast(hidden_BTE):
            total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden_NE, weight_VE, targets_N, grad_scale, dtype, self
            )
        return total

    @staticmethod
    def of_chunk(
        logits_NV: Tensor, targets_N: Tensor, grad_scale: Tensor | None, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Summed loss of one chunk; `with_gradient`: also its gradient by the logits, times
        `grad_scale`, in their dtype. It may take their memory.

        Written out: autograd would keep the log-probabilities, fill a second [N, V] with zeros and
        write a third (one CPU thread, V 8192: the head's step 279 ms with it, 165 ms without).
        """
        exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        log_p_NV = exact.log_softmax(dim=-1)
        del exact
        labels_N1 = targets_N.masked_fill(targets_N == IGNORED, 0)[:, None]
        # Not by the index, which counts a negative label from the end.
        chosen_N = log_p_NV.gather(1, labels_N1)[:, 0]
        loss = -chosen_N.masked_fill(targets_N == IGNORED, 0.0).sum()
        if not with_gradient:
            return loss, None
        if torch.compiler.is_compiling():  # one kernel, with nothing but the logits in memory
            vocabulary = torch.arange(logits_NV.shape[1], device=logits_NV.device)
            gradient_NV = log_p_NV.exp() - (vocabulary == labels_N1).to(log_p_NV.dtype)
            gradient_NV = gradient_NV if grad_scale is None else gradient_NV * grad_scale
            return loss, logits_NV.copy_(gradient_NV)
        rows = torch.arange(len(targets_N), device=targets_N.device)
        minus_one = torch.full_like(log_p_NV[0, :1], -1.0)
        gradient_NV = log_p_NV.exp_().index_put_((rows, labels_N1[:, 0]), minus_one, True)
        if grad_scale is not None:  # one kernel, which also rounds
            return loss, torch.mul(gradient_NV, grad_scale, out=logits_NV)
        return loss, gradient_NV.to(logits_NV.dtype)

    @torch.no_grad()
    def argmax_matches(self, hidden_BTE: Tensor, weight_VE: Tensor, targets_BT: Tensor) -> Tensor:
        """bool [B, T]: whether each target is the likeliest token, as greedy decoding picks it: by
        products in the weight's dtype, since 16 bits tie. False where the target is IGNORED."""
        matches_BT = torch.zeros_like(targets_BT, dtype=torch.bool)
        with without_autocast(hidden_BTE):
            for places in torch.split((targets_BT != IGNORED).nonzero(), self.chunk_rows):
                at = places.unbind(1)
                logits_NV = F.linear(hidden_BTE[at].to(weight_VE.dtype), weight_VE)
                matches_BT[at] = logits_NV.argmax(-1) == targets_BT[at]
        return matches_BT


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        targets_N: Tensor,
        grad_scale: Tensor | None,
        dtype: torch.dtype,
        loss: ChunkedCrossEntropy,
    ) -> Tensor:
        with_gradient = any(ctx.needs_input_grad)
        weight = weight_VE.to(dtype)
        hidden_grad = torch.empty_like(hidden_NE) if with_gradient else None
        total, weight_grad = None, None
        for start in range(0, len(targets_N), loss.chunk_rows):
            rows = slice(start, start + loss.chunk_rows)
            hidden, targets = hidden_NE[rows].to(dtype), targets_N[rows]
            # No name keeps the logits: eager code frees them before it is done.
            of_rows, logits_grad = loss.of_chunk(
                hidden @ weight.T, targets, grad_scale, with_gradient
            )
            total = of_rows if total is None else total + of_rows
            if hidden_grad is not None and logits_grad is not None:
                ignored = (targets == IGNORED)[:, None]  # masked here: E is narrower than V
                hidden_grad[rows] = (logits_grad @ weight).masked_fill_(ignored, 0.0)
                hidden = hidden.masked_fill(ignored, 0.0)
                weight_grad = add_product(weight_grad, logits_grad.T, hidden, weight_VE.dtype)
        ctx.hidden_grad, ctx.weight_grad, ctx.grad_scale = hidden_grad, weight_grad, grad_scale
        assert total is not None, "a batch has rows"
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.hidden_grad, ctx.weight_grad
        if weight_grad is None:
            raise RuntimeError("the chunked loss has no second backward pass: compute it again")
        ctx.hidden_grad = ctx.weight_grad = None  # scaled in place: this graph is spent
        rest = total_grad if ctx.grad_scale is None else total_grad / ctx.grad_scale
        return hidden_grad.mul_(rest), weight_grad.mul_(rest), None, None, None, None


def _observed(x_BTE: Tensor, observers: Iterable[Observer]) -> Tensor:
    for observe in observers:
        observe(x_BTE)
    return x_BTE
