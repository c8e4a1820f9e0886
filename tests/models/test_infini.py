"""Local and Infini-attention, held against the paper's equations written as loops."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from model_check import infini
from model_check.attention import eager, sdpa
from model_check.config.schema import InfiniSettings
from model_check.infini import InfiniAttention, MemoryMasks, Update, read_all
from model_check.model import KVCache, Llama, ModelArgs, Rope

Tiny = Callable[..., Llama]
UPDATES: tuple[Update, ...] = ("linear", "delta")
DOCUMENTS = [[0] * 9 + [1] * 4 + [2] * 20 + [3] * 7, [0] * 8 + [1] * 8 + [2] * 24]
"""Two rows of 40: borders within segments of 8, and on them; documents over one and over many."""


def naive(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, length: int, update: str) -> Tensor:
    """[B, H, T, D] from [B, H, T, D] and [B, G, T, D], one document a row: equations 4 to 10, a
    segment at a time."""
    num_shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(num_shared, dim=1) for x in (k, v))
    return segment_loop(q, k, v, gate, [*range(0, q.shape[2], length), q.shape[2]], update)


def segment_loop(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, borders: list[int], update: str
) -> Tensor:
    """The same for as many key heads as query heads, with segments between these borders."""
    values, weights = (
        q.new_zeros(*q.shape[:2], *q.shape[3:], q.shape[3]),
        q.new_zeros(q[:, :, 0].shape),
    )
    out = []
    for first, last in pairwise(borders):
        queries, keys, new = (x[:, :, first:last] for x in (q, k, v))
        local = eager(queries, keys, new)
        queries, keys = elu(queries) + 1, elu(keys) + 1
        found = queries @ values / (queries @ weights[..., None] + 1e-6)
        share = torch.sigmoid(gate)[:, None, None] if first else 0.0
        out.append(share * found + (1 - share) * local)
        if update == "delta":
            new = new - keys @ values / (keys @ weights[..., None] + 1e-6)
        values, weights = values + keys.mT @ new, weights + keys.sum(2)
    return torch.cat(out, dim=2)


def inputs(dtype: torch.dtype, time: int = 40, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2, of two rows."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, time, width, generator=generator) for heads in (4, 2, 2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def gates(dtype: torch.dtype) -> Tensor:
    return torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=dtype)


class Bare(InfiniAttention):
    """A layer without matrices, whose rotary tables turn nothing."""

    def __init__(self, update: Update, length: int, gate: Tensor) -> None:
        args = ModelArgs(1, 12, 8, 4, 2, 6, 16, tie_word_embeddings=False, max_seq_len=64)
        super().__init__(args, eager, length, update)
        self.gate = nn.Parameter(gate.clone())

    def read(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        rope = Rope(q.new_ones(64, q.shape[3]), q.new_zeros(64, q.shape[3]))
        return self.mix(q, k, v, self.inputs(rope, q.shape[2], documents))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    ("time", "length"), [(40, 8), (40, 13), (37, 8), (40, 40), (7, 1), (40, 20)]
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_parallel_form_is_the_segment_loop(
    update: Update, time: int, length: int, dtype: torch.dtype, limit: float
) -> None:
    q, k, v = inputs(dtype, time)
    found = Bare(update, length, gates(dtype)).read(q, k, v)
    assert (found - naive(q, k, v, gates(dtype), length, update)).abs().max() <= limit


@pytest.mark.parametrize("update", UPDATES)
def test_its_gradients_are_those_of_the_loop(update: Update) -> None:
    layer, gate = Bare(update, 8, gates(torch.float64)), gates(torch.float64).requires_grad_()
    tensors = [x.requires_grad_() for x in inputs(torch.float64, 21)]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 4, 21, 6, dtype=torch.float64, generator=generator)
    ours = torch.autograd.grad((layer.read(*tensors) * weights).sum(), [*tensors, layer.gate])
    loop = (naive(*tensors, gate, 8, update) * weights).sum()
    for own, other in zip(ours, torch.autograd.grad(loop, [*tensors, gate]), strict=True):
        assert (own - other).abs().max() <= 1e-10


@pytest.mark.parametrize("update", UPDATES)
def test_its_gradients_are_its_slopes(update: Update) -> None:
    layer = Bare(update, 3, gates(torch.float64))
    tensors = [x[:1].clone().requires_grad_() for x in inputs(torch.float64, 7, width=3)]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    assert torch.autograd.gradcheck(layer.read, tensors)
    assert torch.autograd.gradcheck(lambda *x: layer.read(*x, documents), tensors)


@pytest.mark.parametrize("update", UPDATES)
def test_with_documents_it_is_the_loop_over_each_of_them(update: Update) -> None:
    """One that begins within a segment has the rest of that segment as its first."""
    q, k, v = inputs(torch.float64)
    gate, length = gates(torch.float64), 8
    found = Bare(update, length, gate).read(q, k, v, torch.tensor(DOCUMENTS))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    for row, numbers in enumerate(DOCUMENTS):
        for number in set(numbers):
            first, size = numbers.index(number), numbers.count(number)
            own = [x[row : row + 1, :, first : first + size] for x in (q, k, v)]
            borders = [0, *range(length - first % length, size, length), size]
            wanted = segment_loop(*own, gate, borders, update)
            assert (found[row, :, first : first + size] - wanted[0]).abs().max() <= 1e-10


def model_of(tiny: Tiny, attention: str, length: int | None = 16, **infini: Any) -> Llama:
    model = tiny(
        attend=sdpa,
        attention=attention,
        infini=InfiniSettings(segment_length=length, **infini),
        training={"context_length": 64},
    )
    return model.eval()


def tokens(time: int = 64, batch: int = 2) -> Tensor:
    return torch.randint(257, (batch, time), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("attention", ["local", "infini"])
@pytest.mark.parametrize("length", [64, 100])
def test_one_segment_is_full_attention(tiny: Tiny, attention: str, length: int) -> None:
    full, other = model_of(tiny, "full"), model_of(tiny, attention, length)
    assert torch.equal(full(tokens()), other(tokens()))
    documents = torch.tensor([[0] * 20 + [1] * 44, [0] * 64])
    assert torch.equal(full(tokens(), documents), other(tokens(), documents))


@pytest.mark.parametrize("update", UPDATES)
def test_a_gate_that_is_shut_is_local_attention(tiny: Tiny, update: str) -> None:
    local, shut = model_of(tiny, "local"), model_of(tiny, "infini", update=update)
    with torch.no_grad():
        for block in shut.layers:
            block.attention.gate.fill_(float("-inf"))  # type: ignore[union-attr,operator]
    assert torch.equal(local(tokens()), shut(tokens()))
    assert not torch.equal(model_of(tiny, "full")(tokens()), shut(tokens()))


def test_the_gates_have_a_gradient_where_there_is_a_memory(tiny: Tiny) -> None:
    for length, is_used in ((16, True), (64, False)):
        model = model_of(tiny, "infini", length)
        model.summed_loss(tokens(), tokens()).backward()
        for block in model.layers:
            gradient = block.attention.gate.grad  # type: ignore[union-attr]
            assert bool((gradient != 0).all()) is is_used  # type: ignore[union-attr]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("attention", ["local", "infini"])
def test_no_position_sees_a_later_one(tiny: Tiny, attention: str, update: str) -> None:
    model = model_of(tiny, attention, 16, update=update)
    before = model(tokens())
    for position in range(64):
        changed = tokens()
        changed[:, position] = (changed[:, position] + 1) % 257
        after = model(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        sees = (before != after).any(dim=(0, 2)).nonzero().flatten().tolist()
        until = 64 if attention == "infini" else (position // 16 + 1) * 16
        assert sees == list(range(position, until))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("attention", ["local", "infini"])
def test_a_document_changes_no_bit_of_another(tiny: Tiny, attention: str, update: str) -> None:
    model = model_of(tiny, attention, 16, update=update)
    numbers = [0] * 9 + [1] * 7 + [2] * 1 + [3] * 40 + [4] * 7
    documents = torch.tensor([numbers, numbers])
    before = model(tokens(), documents)
    for number in range(5):
        changed = tokens()
        own = documents == number
        changed[own] = (changed[own] + 1) % 257
        after = model(changed, documents)
        assert torch.equal(before[~own], after[~own])
        assert not torch.equal(before[own], after[own])


@pytest.mark.parametrize("update", UPDATES)
def test_rows_share_nothing(tiny: Tiny, update: str) -> None:
    model = model_of(tiny, "infini", 16, update=update)
    rows = tokens(batch=3)
    together = model(rows)
    changed = rows.clone()
    changed[1] = (changed[1] + 1) % 257
    after = model(changed)
    assert torch.equal(together[[0, 2]], after[[0, 2]])


@pytest.mark.parametrize("sizes", [(64,), (1,) * 64, (5, 20, 1, 16, 22), (16, 16, 32)])
@pytest.mark.parametrize(
    ("attention", "update"),
    [("full", "linear"), ("local", "linear"), ("infini", "linear"), ("infini", "delta")],
)
def test_a_stream_is_one_forward_pass(
    tiny: Tiny, attention: str, update: str, sizes: tuple[int, ...]
) -> None:
    model = model_of(tiny, attention, 16, update=update)
    whole = model(tokens())
    caches = model.new_caches()
    parts = [model.decode(part, caches) for part in tokens().split(sizes, dim=1)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-4


@pytest.mark.parametrize("attention", ["local", "infini"])
def test_a_streams_state_does_not_grow_and_its_text_has_no_end(tiny: Tiny, attention: str) -> None:
    model, sizes = model_of(tiny, attention, 16), []
    caches = model.new_caches()
    model.decode(tokens(time=24), caches)
    for _ in range(5):
        sizes.append(sum(num_bytes(cache) for cache in caches))
        assert model.decode(tokens(time=64), caches).isfinite().all()
    assert len(set(sizes)) == 1


def test_the_last_logits_are_those_of_the_whole_text(tiny: Tiny) -> None:
    """Also of a text that is longer than the rotary tables, which is read in pieces."""
    for attention, time in (("full", 64), ("infini", 150)):
        model = model_of(tiny, attention, 16)
        whole = model.decode(tokens(time=time), model.new_caches())
        last = model.decode(tokens(time=time), model.new_caches(), only_last=True)
        assert whole.shape == (2, time, 257)
        torch.testing.assert_close(last, whole[:, -1:])


def test_a_stream_of_full_attention_ends_with_its_context(tiny: Tiny) -> None:
    model = model_of(tiny, "full")
    caches = model.new_caches()
    model.decode(tokens(time=64), caches)
    with pytest.raises(ValueError, match="64 tokens"):
        model.decode(tokens(time=1), caches)


@pytest.mark.parametrize("attention", ["local", "infini"])
def test_so_does_a_segment_that_is_longer(tiny: Tiny, attention: str) -> None:
    model = model_of(tiny, attention, 100)
    caches = model.new_caches()
    logits = model.decode(tokens(time=64), caches)
    assert (logits - model(tokens(time=64))).abs().max() <= 1e-4
    with pytest.raises(ValueError, match="64 tokens"):
        model.decode(tokens(time=1), caches)


def num_bytes(cache: KVCache) -> int:
    tensors = [cache.rows[0], *(getattr(cache, "memory", None) or ())]
    if isinstance(cache, infini.InfiniCache):
        tensors.append(cache.unrotated.rows[0])
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("update", UPDATES)
def test_it_stays_finite_with_large_keys_in_16_bits(tiny: Tiny, update: str) -> None:
    model = model_of(tiny, "infini", 16, update=update)
    with torch.no_grad():
        for block in model.layers:
            block.attention.wk.weight.mul_(100)  # type: ignore[union-attr,operator]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.summed_loss(tokens(), tokens())
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_memory_is_in_float32_whatever_the_products_are(tiny: Tiny) -> None:
    model = model_of(tiny, "infini", 16)
    with seen_dtypes() as dtypes, torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert dtypes == {torch.float32}


@contextmanager
def seen_dtypes() -> Iterator[set[torch.dtype]]:
    dtypes: set[torch.dtype] = set()
    found = infini._found

    def watched(features: Tensor, memory: infini.Memory) -> Tensor:
        out = found(features, memory)
        dtypes.update(x.dtype for x in (features, *memory, out))
        return out

    infini._found = watched
    try:
        yield dtypes
    finally:
        infini._found = found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feature_is_positive_far_below_where_elu_plus_one_is_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([-80.0, -20.0, -8.0, 0.0, 8.0], dtype=dtype)
    assert (elu(x) + 1 == 0).any()
    assert (infini.feature(x) > 0).all()


@pytest.mark.parametrize("update", UPDATES)
def test_what_is_found_does_not_depend_on_the_rows_beside_it(update: str) -> None:
    q, k, v = (x[:, None].expand(2, 3, *x.shape[1:]).contiguous() for x in inputs(torch.float32, 8))
    alone = read_all(q[:1], k[:1], v[:1], MemoryMasks.of(torch.zeros(1, 3, 8)), update)  # type: ignore[arg-type]
    assert torch.equal(read_all(q, k, v, MemoryMasks.of(torch.zeros(1, 3, 8)), update)[:1], alone)  # type: ignore[arg-type]
