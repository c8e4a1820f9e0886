"""Settings -> a model on its device, with the same first weights on every device and machine. And
what fits of weights that lie elsewhere: which tensors, and a vocabulary that grows."""

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model_check.attention import AttentionFn
from model_check.config import shape
from model_check.config.attention import KINDS
from model_check.config.derived import EAGER_CHUNK_ROWS, loss_chunk_rows
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import EMBEDDING, HEAD, Geometry
from model_check.model import Attention, Llama, ModelArgs
from model_check.utils.words import few

PIECE_NUMEL = 2**24
"""Elements drawn from one generator: 64 MiB of float32, so that threads share one large matrix."""
BY_TOKEN = (EMBEDDING.name, HEAD.name)
"""The matrices with a row a token."""
Shapes = Mapping[str, Sequence[int]]


def build_model(
    settings: Settings, geometry: Geometry, attend: AttentionFn, device: torch.device
) -> Llama:
    """A model in float32 on `device`, with the first values that `config.shape` gives."""
    model = empty_model(settings, geometry, attend, device)
    initialise(model, settings.model, settings.system.seed)
    return model


def build_sharded(
    settings: Settings,
    geometry: Geometry,
    attend: AttentionFn,
    device: torch.device,
    shard: Callable[[Llama], None],
    local_shard: Callable[[Tensor], tuple[Tensor, int]],
) -> Llama:
    """Builds the model of build_model, float32, of which only a part lies here: `shard` gets the
    model on device `meta` and leaves that part, undefined; `local_shard`: see `initialise`."""
    model = empty_model(settings, geometry, attend, torch.device("meta"))
    shard(model)
    model.set_rope(device)
    initialise(model, settings.model, settings.system.seed, local_shard=local_shard)
    return model


def empty_model(
    settings: Settings, geometry: Geometry, attend: AttentionFn, device: torch.device
) -> Llama:
    """The model with its rotary tables, and its weights as allocated; on device `meta` without any
    storage."""
    args = model_args(settings, geometry, device)
    make_attention = partial(attention_class(geometry).of, args, attend, settings)
    with device:
        return Llama(args, make_attention)


def attention_class(geometry: Geometry) -> type[Attention]:
    module, _, name = KINDS[geometry.attention].implementation.partition(":")
    found: type[Attention] = getattr(importlib.import_module(module), name)
    return found


def model_args(settings: Settings, geometry: Geometry, device: torch.device) -> ModelArgs:
    training = settings.training
    rows = loss_chunk_rows(settings, geometry.vocab_size, device.type)
    return ModelArgs.of(
        geometry,
        max_seq_len=training.context_length,
        rope_theta=settings.model.rope_theta,
        rope_scaling=settings.model.rope_scaling,
        norm_eps=settings.model.rms_norm_eps,
        gradient_checkpointing=training.gradient_checkpointing,
        # Eager code has no memory for chunks that compiled code affords.
        loss_chunk_rows=min(rows, EAGER_CHUNK_ROWS) if training.compile else rows,
        compiled_loss_chunk_rows=rows,
    )


def _all_of_it(parameter: Tensor) -> tuple[Tensor, int]:
    return parameter.detach(), 0


@torch.no_grad()
def initialise(
    model: nn.Module,
    settings: ModelSettings,
    seed: int,
    piece_numel: int = PIECE_NUMEL,
    local_shard: Callable[[Tensor], tuple[Tensor, int]] = _all_of_it,
) -> None:
    """Overwrites every parameter. All values are drawn on the CPU: the generator of a GPU could
    differ.

    `local_shard`: returns the values of a parameter that lie here, the live ones, float32 [rows,
    ...], and the place of the first in the whole; they are the same wherever the others lie.

    `normal_` runs on one thread and takes 5 to 12 ns an element (2 billion: 10 to 20 s), so threads
    draw pieces in parallel. Each piece has a generator seeded by (seed, name, piece): values do not
    depend on the number of threads.
    """
    pieces: list[_Piece] = []
    for name, parameter in model.named_parameters():
        own, first = local_shard(parameter)
        if (value := shape.parameter(name).initial(settings)) is not None:
            own.fill_(value)
        elif own.numel():
            pieces += _pieces(f"{seed}:{name}", own.view(-1), first, parameter.numel(), piece_numel)
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(_draw, pieces, repeat(settings.init_std)))


class _Piece(NamedTuple):
    """What one generator draws, and what of it lies here."""

    key: str
    num_values: int
    first: int
    """Of those that lie here."""
    target: Tensor


def _pieces(
    key: str, own: Tensor, first: int, num_values: int, piece_numel: int
) -> Iterator[_Piece]:
    """`own`: values `first` and the next ones, of `num_values`."""
    end = first + own.numel()
    for begin in range(first - first % piece_numel, end, piece_numel):
        size = min(piece_numel, num_values - begin)
        low, high = max(first, begin), min(end, begin + size)
        target = own[low - first : high - first]
        yield _Piece(f"{key}:{begin // piece_numel}", size, low - begin, target)


def _draw(piece: _Piece, std: float) -> None:
    digest = hashlib.sha256(piece.key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    drawn = torch.empty(piece.num_values).normal_(0.0, std, generator=generator)
    piece.target.copy_(drawn[piece.first : piece.first + piece.target.numel()])


def mismatch(saved: Shapes, own: Shapes) -> str | None:
    """Which saved tensors are missing, unexpected or of another shape, in one line; None where all
    fit."""
    reshaped = [
        f"{name} {list(saved[name])} (here {list(own[name])})"
        for name in sorted(own.keys() & saved.keys())
        if list(saved[name]) != list(own[name])
    ]
    kinds = {
        "missing": sorted(own.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - own.keys()),
        "of another shape": reshaped,
    }
    return "; ".join(f"{few(names)} {what}" for what, names in kinds.items() if names) or None


def with_rows(weight_VE: Tensor, num_rows: int) -> Tensor:
    """[num_rows, E]: those of `weight`, and for each further token their mean: its score is then at
    most that of a token that is there, so no sequence becomes much less likely (Hewitt,
    Initializing New Word Embeddings for Pretrained Language Models, 2021). As it is where it has
    that many rows, or more."""
    num_new = num_rows - len(weight_VE)
    if num_new <= 0:
        return weight_VE
    mean_E = weight_VE.double().mean(dim=0).to(weight_VE.dtype)
    return torch.cat([weight_VE, mean_E.expand(num_new, -1)])


def grown(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `weights` with as many rows as the model's `own`, where embedding and head, [V, E],
    have fewer; the others are the same tensors."""
    return {
        name: with_rows(weight, len(own[name])) if _has_fewer_rows(name, weight, own) else weight
        for name, weight in weights.items()
    }


def _has_fewer_rows(name: str, weight: Tensor, own: Mapping[str, Tensor]) -> bool:
    return name in BY_TOKEN and name in own and lacks_rows(weight.shape, len(own[name]))


def lacks_rows(sizes: Sequence[int], num_rows: int) -> bool:
    """Whether a matrix of these sizes can grow to so many rows."""
    return len(sizes) == 2 and 0 < sizes[0] < num_rows


def growth(num_before: int, num_now: int) -> str | None:
    """A line for people; None where the vocabulary does not grow."""
    if num_now <= num_before:
        return None
    num_new = num_now - num_before
    return (
        f"weights: {num_new:,} new token{'s'[: num_new > 1]} beside {num_before:,}: each begins as "
        "the mean of the others"
    )
