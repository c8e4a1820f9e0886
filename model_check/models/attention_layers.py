"""What of the past a position reads: all of it (full), its own segment (local), or its own segment
and a compressed memory of the earlier ones (infini). One class each, by model.attention.

Shapes: B batch, T time, S segments, N positions of a segment, E embedding width, H query heads, G
key/value heads, R = H / G, D width of a head.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from model_check.config.schema import InfiniSettings
from model_check.config.shape import Geometry
from model_check.models.attention import AttentionFn, resumed
from model_check.models.compressive_memory import (
    Memory,
    Spans,
    Update,
    empty,
    read,
    read_all,
    write,
)
from model_check.models.kv_cache import Cached
from model_check.models.loss import compute_dtype, without_autocast
from model_check.models.rope import rotate

NO_DOCUMENT = -1
"""That of a position which only fills up a segment."""


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left as allocated: `build_model` fills every matrix. (torch's own filling takes seconds,
        and on the meta device imports torch._dynamo.)"""


class Positions(NamedTuple):
    """What all blocks share of a batch, whose rows are cut into segments: B * S rows of N. Full
    attention has one segment, the row."""

    cos: Tensor
    """[N, D], or of documents [B * S, 1, N, D]"""
    sin: Tensor
    visible: Tensor | None
    """bool [B * S, 1, N, N]: which position sees which; None: every earlier one."""
    spans: Spans | None
    """Of segments; None: the attention does not remember."""


class Tables(NamedTuple):
    """Cosines and sines of the next positions, [T, D]."""

    cos: Tensor
    sin: Tensor


class Past(NamedTuple):
    """What one block keeps of a text of which it has read a part: keys and values of the open
    segment, [B, G, n, D], which full attention never closes, and the memory of the closed ones."""

    keys: Cached | None = None
    """With their positions."""
    plain_keys: Cached | None = None
    """Without; of infini alone."""
    values: Cached | None = None
    memory: Memory | None = None

    @property
    def num_open(self) -> int:
        """Positions in the open segment."""
        return 0 if self.keys is None else self.keys.num


NO_PAST = Past()


class FullAttention(nn.Module):
    """Grouped-query attention: several query heads share a key and a value head (Ainslie et al.,
    GQA: Training Generalized Multi-Query Transformer Models, arXiv 2305.13245, section 2.2)."""

    remembers: ClassVar[bool] = False
    """Whether closed segments leave a memory."""

    def __init__(self, geometry: Geometry, attend: AttentionFn) -> None:
        super().__init__()
        self.head_dim = geometry.head_dim
        self.attend = attend
        width = geometry.hidden_size
        self.wq = Linear(width, geometry.query_width, bias=False)
        self.wk = Linear(width, geometry.key_width, bias=False)
        self.wv = Linear(width, geometry.key_width, bias=False)
        self.wo = Linear(geometry.query_width, width, bias=False)

    def forward(self, x_BTE: Tensor, positions: Positions) -> Tensor:
        x_BTE = x_BTE.to(compute_dtype(x_BTE))  # autocast would keep a copy for each matrix
        q_BHTD, k_BGTD, v_BGTD = (self._heads(w(x_BTE)) for w in (self.wq, self.wk, self.wv))
        out_BHTD = self._read(q_BHTD, k_BGTD, v_BGTD, positions)
        out: Tensor = self.wo(out_BHTD.transpose(1, 2).flatten(2))
        return out

    def go_on(self, x_BTE: Tensor, past: Past, tables: Tables) -> tuple[Tensor, Past]:
        """The output for the next positions, none of them beyond the open segment, and what they
        leave for those after them."""
        q_BHTD, k_BGTD, v_BGTD = (self._heads(w(x_BTE)) for w in (self.wq, self.wk, self.wv))
        both = rotate(torch.cat((q_BHTD, k_BGTD), dim=1), *tables)
        num_heads = q_BHTD.shape[1]
        turned_q, turned_k = both[:, :num_heads], both[:, num_heads:]
        keys, values = _appended(past.keys, turned_k), _appended(past.values, v_BGTD)
        out_BHTD = resumed(turned_q, keys.rows, values.rows)
        out: Tensor = self.wo(self._completed(out_BHTD, q_BHTD, past).transpose(1, 2).flatten(2))
        plain_keys = _appended(past.plain_keys, k_BGTD) if self.remembers else None
        return out, Past(keys, plain_keys, values, past.memory)

    def closed(self, past: Past) -> Past:
        """What is left of a segment that is over."""
        return NO_PAST

    def _completed(self, local: Tensor, q: Tensor, past: Past) -> Tensor:
        """With what the past holds beyond the open segment. [B, H, T, D]"""
        return local

    def _read(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        """[rows, H, time, D]: causal attention within each row."""
        cos, sin, visible, _ = positions
        return self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, visible)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        batch, time, width = x.shape
        return x.view(batch, time, width // self.head_dim, self.head_dim).transpose(1, 2)


class LocalAttention(FullAttention):
    """Causal attention within segments: nothing crosses their borders. The segments of a row are
    rows of their own to the kernel."""

    def _read(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        batch, _, time, _ = q.shape
        length = positions.cos.shape[-2]
        q, k, v = (folded(x, length) for x in (q, k, v))
        return unfolded(self._read_segments(q, k, v, positions, batch), batch, time)

    def _read_segments(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, batch: int
    ) -> Tensor:
        """[B * S, heads, N, D] -> [B * S, H, N, D]."""
        return super()._read(q, k, v, positions)


class InfiniAttention(LocalAttention):
    """Local attention beside a memory of the earlier segments, mixed by a gate for each query head
    (Munkhdalai et al., Leave No Context Behind, arXiv 2404.07143, equations 4 to 10).

    The memory reads queries and keys without their positions, and before the segment's own are
    written: else the future would leak. Where it is empty, in a row's or document's first segment,
    the output is the local one, ungated: with one segment this is full attention.
    """

    remembers = True

    def __init__(self, geometry: Geometry, attend: AttentionFn, update: Update) -> None:
        super().__init__(geometry, attend)
        self.update = update
        self.gate = nn.Parameter(torch.empty(geometry.num_heads))

    def _read_segments(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, batch: int
    ) -> Tensor:
        local = super()._read_segments(q, k, v, positions, batch)
        assert positions.spans is not None
        with without_autocast(q):
            q, k, v = (by_row(x, batch) for x in (q, k, v))
            found = read_all(q, k, v, positions.spans, self.update)
            reads = positions.spans.reads[:, :, None, :, None]
            return self._mixed(by_row(local, batch), found, reads).flatten(0, 1)

    def closed(self, past: Past) -> Past:
        assert past.plain_keys is not None
        assert past.values is not None
        keys, values = past.plain_keys.rows, past.values.rows
        return Past(memory=write(keys, values, past.memory or empty(keys), self.update))

    def _completed(self, local: Tensor, q: Tensor, past: Past) -> Tensor:
        if past.memory is None:
            return local
        found = read(q, past.memory)
        return self._mixed(local, found, torch.ones_like(found[..., :1]))

    def _mixed(self, local: Tensor, found: Tensor, reads: Tensor) -> Tensor:
        """Equation 10: sigmoid(gate) of what was found, the rest local; all of it local where
        `reads` is 0. [..., H, N, D]"""
        share = torch.sigmoid(self.gate.to(found.dtype))[:, None, None] * reads
        exact = local.to(found.dtype)
        return (exact + share * (found - exact)).to(local.dtype)


KINDS: dict[str, Callable[[Geometry, AttentionFn, InfiniSettings], FullAttention]] = {
    "full": lambda geometry, attend, _: FullAttention(geometry, attend),
    "local": lambda geometry, attend, _: LocalAttention(geometry, attend),
    "infini": lambda geometry, attend, infini: InfiniAttention(geometry, attend, infini.update),
}
"""By model.attention: the attention of one block."""


def _appended(before: Cached | None, x_BGTD: Tensor) -> Cached:
    return Cached(x_BGTD) if before is None else before.appended(x_BGTD)


def by_row(x: Tensor, batch: int) -> Tensor:
    """[B * S, ...] -> [B, S, ...]"""
    return x.view(batch, -1, *x.shape[1:])


def folded(x_BHTD: Tensor, length: int) -> Tensor:
    """[B * S, heads, N, D]; the last segment is filled up with zeros, which no position sees."""
    missing = -x_BHTD.shape[2] % length
    if missing:
        x_BHTD = nn.functional.pad(x_BHTD, (0, 0, 0, missing))
    batch, heads, time, width = x_BHTD.shape
    segments = x_BHTD.reshape(batch, heads, time // length, length, width)
    return segments.transpose(1, 2).flatten(0, 1)


def unfolded(x: Tensor, batch: int, time: int) -> Tensor:
    """[B * S, heads, N, D] -> [B, heads, T, D]."""
    return by_row(x, batch).transpose(1, 2).flatten(2, 3)[:, :, :time]


def folded_documents(documents_BT: Tensor, length: int) -> Tensor:
    """[B * S, N]"""
    missing = -documents_BT.shape[1] % length
    if missing:
        documents_BT = nn.functional.pad(documents_BT, (0, missing), value=NO_DOCUMENT)
    return documents_BT.reshape(-1, length)
