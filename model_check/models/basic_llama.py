"""The LLaMA decoder: pre-norm blocks of grouped-query attention with rotary embedding, and SwiGLU.

Shapes: B batch, T time, E embedding width (hidden_size), H query heads, G key/value heads, D width
of a head, V vocabulary.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_check.config.shape import Geometry
from model_check.models.attention import AttentionFn, visible_within
from model_check.models.loss import compute_dtype, linear_cross_entropy
from model_check.models.rope import positions_within, rotate


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left as allocated: `build_model` fills every matrix. (torch's own filling takes seconds,
        and on the meta device imports torch._dynamo.)"""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As in Linear."""


class Attention(nn.Module):
    """Grouped-query attention: several query heads share a key and a value head (Ainslie et al.,
    GQA: Training Generalized Multi-Query Transformer Models, arXiv 2305.13245, section 2.2)."""

    def __init__(self, geometry: Geometry, attend: AttentionFn) -> None:
        super().__init__()
        self.head_dim = geometry.head_dim
        self.attend = attend
        width = geometry.hidden_size
        self.wq = Linear(width, geometry.query_width, bias=False)
        self.wk = Linear(width, geometry.key_width, bias=False)
        self.wv = Linear(width, geometry.key_width, bias=False)
        self.wo = Linear(geometry.query_width, width, bias=False)

    def forward(
        self, x_BTE: Tensor, cos_TD: Tensor, sin_TD: Tensor, visible_B1TT: Tensor | None
    ) -> Tensor:
        x_BTE = x_BTE.to(compute_dtype(x_BTE))  # autocast would keep a copy for each matrix
        q_BHTD = rotate(self._heads(self.wq(x_BTE)), cos_TD, sin_TD)
        k_BGTD = rotate(self._heads(self.wk(x_BTE)), cos_TD, sin_TD)
        v_BGTD = self._heads(self.wv(x_BTE))
        out_BHTD = self.attend(q_BHTD, k_BGTD, v_BGTD, visible_B1TT)
        out: Tensor = self.wo(out_BHTD.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        batch, time, width = x.shape
        return x.view(batch, time, width // self.head_dim, self.head_dim).transpose(1, 2)


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

    def __init__(self, geometry: Geometry, attend: AttentionFn, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(geometry.hidden_size, eps=norm_eps)
        self.attention = Attention(geometry, attend)
        self.ffn_norm = nn.RMSNorm(geometry.hidden_size, eps=norm_eps)
        self.feed_forward = FeedForward(geometry)

    def forward(
        self, x_BTE: Tensor, cos_TD: Tensor, sin_TD: Tensor, visible_B1TT: Tensor | None
    ) -> Tensor:
        x_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), cos_TD, sin_TD, visible_B1TT)
        out: Tensor = x_BTE + self.feed_forward(self.ffn_norm(x_BTE))
        return out


class HeadLoss(nn.Module):
    """The head and its cross entropy in one. It owns no weight: a tied head has the embedding's."""

    def __init__(self, chunk_rows: int) -> None:
        super().__init__()
        self.chunk_rows = chunk_rows

    def forward(self, hidden_BTE: Tensor, weight_VE: Tensor, targets_BT: Tensor) -> Tensor:
        rows = hidden_BTE.flatten(0, 1), weight_VE, targets_BT.flatten()
        return linear_cross_entropy(*rows, self.chunk_rows)


class BasicLlama(nn.Module):
    """The whole model. `build_model` makes one on its device, with first weights and tables."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        geometry: Geometry,
        attend: AttentionFn,
        *,
        norm_eps: float = 1e-5,
        gradient_checkpointing: bool = False,
        loss_chunk_rows: int = 2048,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.watchers: tuple[Callable[[Tensor], object], ...] = ()
        """Called with what flows between blocks: the embedding's output, each block's, the last
        norm's; where gradients are wanted."""
        self.tok_embed = Embedding(geometry.vocab_size, geometry.hidden_size)
        blocks = (Block(geometry, attend, norm_eps) for _ in range(geometry.num_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(geometry.hidden_size, eps=norm_eps)
        if not geometry.tied:
            self.output = Linear(geometry.hidden_size, geometry.vocab_size, bias=False)
        self.tied = geometry.tied
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
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Summed cross entropy, a float32 scalar. `targets` are the next tokens already: position t
        is scored against targets[t].

        `documents`, int64: attention stays among neighbours of equal number, and positions start
        again with each document.
        """
        hidden_BTE = self.hidden(tokens_BT, documents_BT)
        total: Tensor = self.loss(hidden_BTE, self.head_weight, targets_BT)
        return total

    def logits(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, V]: position t's prediction of the token after it."""
        return nn.functional.linear(self.hidden(tokens_BT, documents_BT), self.head_weight)

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, E]: what the head reads."""
        context, with_gradients = self._context(tokens_BT, documents_BT), torch.is_grad_enabled()
        watchers = self.watchers if with_gradients else ()
        x_BTE = self.tok_embed(tokens_BT)
        _show(x_BTE, watchers)
        for block in self.layers:
            if self.gradient_checkpointing and with_gradients:
                # No dropout: no random state to put back for the recomputation.
                x_BTE = checkpoint(
                    block, x_BTE, *context, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTE = block(x_BTE, *context)
            _show(x_BTE, watchers)
        out: Tensor = self.norm(x_BTE)
        _show(out, watchers)
        return out

    def _context(
        self, tokens_BT: Tensor, documents_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What all blocks share: cosines and sines of the positions, and which positions see
        which."""
        if documents_BT is None:
            time = tokens_BT.shape[1]
            return self.rope_cos[:time], self.rope_sin[:time], None
        positions_B1T = positions_within(documents_BT)[:, None]
        cos_B1TD, sin_B1TD = self.rope_cos[positions_B1T], self.rope_sin[positions_B1T]
        return cos_B1TD, sin_B1TD, visible_within(documents_BT)


def _show(x_BTE: Tensor, watchers: Iterable[Callable[[Tensor], object]]) -> None:
    for watcher in watchers:
        watcher(x_BTE)
