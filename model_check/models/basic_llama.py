"""The LLaMA decoder: pre-norm blocks of grouped-query attention with rotary embedding, and SwiGLU.

Shapes: B batch, T time, E embedding width (hidden_size), H query heads, G key/value heads, D width
of a head, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_check.config.shape import Geometry
from model_check.models.attention import visible_within
from model_check.models.attention_layers import (
    NO_PAST,
    FullAttention,
    Linear,
    Past,
    Positions,
    Tables,
    by_row,
    folded_documents,
)
from model_check.models.compressive_memory import spans
from model_check.models.loss import (
    ChunkLoss,
    are_likeliest,
    compute_dtype,
    linear_cross_entropy,
)
from model_check.models.rope import positions_within


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As in Linear."""


class RmsNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        """In the wider type of its input and its weight: a sharded block has a weight of 16 bits,
        and torch's fused kernels take two types that are equal."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, x.dtype))
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202,
    section 2)."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.w1 = Linear(geometry.hidden_size, geometry.intermediate_size, bias=False)
        self.w2 = Linear(geometry.intermediate_size, geometry.hidden_size, bias=False)
        self.w3 = Linear(geometry.hidden_size, geometry.intermediate_size, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        x_BTE = x_BTE.to(compute_dtype(x_BTE))  # as in Attention
        out: Tensor = self.w2(nn.functional.silu(self.w1(x_BTE)) * self.w3(x_BTE))
        return out


class Block(nn.Module):
    """Norm first, and RMSNorm (Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv
    1910.07467, section 3)."""

    def __init__(self, geometry: Geometry, attention: FullAttention, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(geometry.hidden_size, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = RmsNorm(geometry.hidden_size, eps=norm_eps)
        self.feed_forward = FeedForward(geometry)

    def forward(self, x_BTE: Tensor, positions: Positions) -> Tensor:
        return self._added(x_BTE, self.attention(self.attention_norm(x_BTE), positions))

    def go_on(self, x_BTE: Tensor, past: Past, tables: Tables) -> tuple[Tensor, Past]:
        """As FullAttention.go_on."""
        attended, past = self.attention.go_on(self.attention_norm(x_BTE), past, tables)
        return self._added(x_BTE, attended), past

    def _added(self, x_BTE: Tensor, attended_BTE: Tensor) -> Tensor:
        x_BTE = x_BTE + attended_BTE
        out: Tensor = x_BTE + self.feed_forward(self.ffn_norm(x_BTE))
        return out


class HeadLoss(nn.Module):
    """The head and its cross entropy in one. It owns no weight: a tied head has the embedding's."""

    def __init__(self, chunk_rows: int) -> None:
        super().__init__()
        self.chunk_rows = chunk_rows
        self.chunk_loss: ChunkLoss | None = None
        """Compiled code of loss_and_gradient; None: eager."""
        self.adds_in_float32 = False

    def forward(
        self,
        hidden_BTE: Tensor,
        weight_VE: Tensor,
        targets_BT: Tensor,
        *,
        expected_grad: Tensor | None = None,
    ) -> Tensor:
        return linear_cross_entropy(
            hidden_BTE.flatten(0, 1),
            weight_VE,
            targets_BT.flatten(),
            self.chunk_rows,
            expected_grad,
            self.chunk_loss,
            adds_in_float32=self.adds_in_float32,
        )


class BasicLlama(nn.Module):
    """The whole model. `build_model` makes one on its device, with first weights and tables."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        geometry: Geometry,
        make_attention: Callable[[], FullAttention],
        *,
        segment_length: int | None = None,
        norm_eps: float = 1e-5,
        gradient_checkpointing: bool = False,
        loss_chunk_rows: int = 2048,
    ) -> None:
        """`make_attention`: makes that of one block. `segment_length`: positions that it reads at
        once; None: all of a row."""
        super().__init__()
        self.segment_length = segment_length
        self.gradient_checkpointing = gradient_checkpointing
        self.watchers: tuple[Callable[[Tensor], object], ...] = ()
        """Called with what flows between blocks: the embedding's output, each block's, the last
        norm's; where gradients are wanted."""
        self.tok_embed = Embedding(geometry.vocab_size, geometry.hidden_size)
        layers = range(geometry.num_layers)
        blocks = [Block(geometry, make_attention(), norm_eps) for _ in layers]
        self.layers = nn.ModuleList(blocks)
        self.remembers = any(block.attention.remembers for block in blocks)
        self.norm = RmsNorm(geometry.hidden_size, eps=norm_eps)
        if not geometry.tie_word_embeddings:
            self.output = Linear(geometry.hidden_size, geometry.vocab_size, bias=False)
        self.tied = geometry.tie_word_embeddings
        self.loss = HeadLoss(loss_chunk_rows)

    @property
    def head_weight(self) -> Tensor:
        """[V, E]"""
        return self.tok_embed.weight if self.tied else self.output.weight

    def set_rope(self, cos_TD: Tensor, sin_TD: Tensor) -> None:
        """The tables limit the context length. They follow from the settings, so checkpoints leave
        them out."""
        self.register_buffer("rope_cos", cos_TD, persistent=False)
        self.register_buffer("rope_sin", sin_TD, persistent=False)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        *,
        expected_grad: Tensor | None = None,
    ) -> Tensor:
        """Summed cross entropy, a float32 scalar. `targets` are the next tokens already: position t
        is scored against targets[t].

        `documents`, int64: attention stays among neighbours of equal number, and positions start
        again with each document. `expected_grad`: what backward will be called with, if that is
        known: see `loss.linear_cross_entropy`.
        """
        hidden_BTE = self.hidden(tokens_BT, documents_BT)
        total: Tensor = self.loss(
            hidden_BTE, self.head_weight, targets_BT, expected_grad=expected_grad
        )
        return total

    def scored(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss as `forward` gives it; and bool [B, T], as `loss.are_likeliest`."""
        hidden_BTE = self.hidden(tokens_BT, documents_BT)
        total: Tensor = self.loss(hidden_BTE, self.head_weight, targets_BT)
        rows = hidden_BTE.flatten(0, 1), self.head_weight, targets_BT.flatten()
        hits_N = are_likeliest(*rows, self.loss.chunk_rows)
        return total, hits_N.view_as(targets_BT)

    def logits(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, V]: position t's prediction of the token after it."""
        return nn.functional.linear(self.hidden(tokens_BT, documents_BT), self.head_weight)

    @torch.no_grad()
    def go_on(
        self, tokens_BT: Tensor, pasts: Sequence[Past] | None = None, *, only_last: bool = False
    ) -> tuple[Tensor, list[Past]]:
        """The logits [B, T, V] of tokens that follow those of earlier calls, one document a row,
        and what the next call needs: `pasts`, one a block; None: nothing came before. `only_last`:
        the last token's logits alone, [B, 1, V].

        With segments its size is limited, and the text is not; full attention keeps all. Raises
        ValueError where a segment, or all of a text, is longer than the rotary tables.
        """
        pasts = list(pasts or (NO_PAST for _ in self.layers))
        parts = []
        while tokens_BT.shape[1]:
            num_open = pasts[0].num_open
            longest = min(self.segment_length or len(self.rope_cos), len(self.rope_cos))
            num = min(tokens_BT.shape[1], longest - num_open)
            if not num:
                raise ValueError(f"the rotary tables end with the context, {num_open} tokens")
            rows = slice(num_open, num_open + num)
            is_over = num_open + num == self.segment_length
            x_BTE = self.tok_embed(tokens_BT[:, :num])
            tables = Tables(self.rope_cos[rows], self.rope_sin[rows])
            for number, block in enumerate(self.layers):
                x_BTE, past = block.go_on(x_BTE, pasts[number], tables)  # type: ignore[operator]
                pasts[number] = block.attention.closed(past) if is_over else past  # type: ignore[union-attr,operator]
            tokens_BT = tokens_BT[:, num:]
            if not only_last:
                parts.append(nn.functional.linear(self.norm(x_BTE), self.head_weight))
            elif not tokens_BT.shape[1]:
                parts.append(nn.functional.linear(self.norm(x_BTE[:, -1:]), self.head_weight))
        return torch.cat(parts, dim=1), pasts

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, E]: what the head reads."""
        positions = self._positions(tokens_BT, documents_BT)
        with_gradients = torch.is_grad_enabled()
        watchers = self.watchers if with_gradients else ()
        x_BTE = self.tok_embed(tokens_BT)
        _show(x_BTE, watchers)
        for block in self.layers:
            if self.gradient_checkpointing and with_gradients:
                # No dropout: no random state to put back for the recomputation.
                x_BTE = checkpoint(
                    block, x_BTE, positions, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTE = block(x_BTE, positions)
            _show(x_BTE, watchers)
        out: Tensor = self.norm(x_BTE)
        _show(out, watchers)
        return out

    def _positions(self, tokens_BT: Tensor, documents_BT: Tensor | None) -> Positions:
        """They begin again with each segment and each document."""
        batch, time = tokens_BT.shape
        length = min(self.segment_length or time, time)
        if documents_BT is None:
            tables = self.rope_cos[:length], self.rope_sin[:length]
            of_batch = spans(_one_document(tokens_BT, length)) if self.remembers else None
            return Positions(*tables, None, of_batch)
        documents = folded_documents(documents_BT, length)
        numbers = positions_within(documents)[:, None]
        tables = self.rope_cos[numbers], self.rope_sin[numbers]
        of_rows = spans(by_row(documents, batch)) if self.remembers else None
        return Positions(*tables, visible_within(documents), of_rows)


def _one_document(tokens_BT: Tensor, length: int) -> Tensor:
    """[1, S, N]: one row, which serves a batch without documents."""
    return folded_documents(torch.zeros_like(tokens_BT[:1]), length)[None]


def _show(x_BTE: Tensor, watchers: Iterable[Callable[[Tensor], object]]) -> None:
    for watcher in watchers:
        watcher(x_BTE)
