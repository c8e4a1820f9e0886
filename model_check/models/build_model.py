"""Settings -> a model on its device, with the same first weights on every device and machine."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.config import shape
from model_check.config.derived import loss_chunk_rows, segment_length
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import Geometry
from model_check.models.attention import AttentionFn
from model_check.models.attention_layers import KINDS
from model_check.models.basic_llama import BasicLlama
from model_check.models.rope import inverse_frequencies, rope_tables

PIECE_NUMEL = 2**24
"""Elements drawn from one generator: 64 MiB of float32, so that threads share one large matrix."""


def build_model(
    settings: Settings, geometry: Geometry, attend: AttentionFn, device: torch.device
) -> BasicLlama:
    """A model in float32 on `device`, with the first values that `config.shape` gives."""
    model = unfilled_model(settings, geometry, attend, device)
    initialise(model, settings.model, settings.system.seed)
    return model


def unfilled_model(
    settings: Settings, geometry: Geometry, attend: AttentionFn, device: torch.device
) -> BasicLlama:
    """The same with its rotary tables, for weights from elsewhere."""
    model = empty_model(settings, geometry, attend, device)
    _set_tables(model, settings, geometry, device)
    return model


def _set_tables(
    model: BasicLlama, settings: Settings, geometry: Geometry, device: torch.device
) -> None:
    frequencies = inverse_frequencies(
        geometry.head_dim, settings.model.rope_theta, settings.model.rope_scaling
    )
    tables = rope_tables(frequencies, settings.training.context_length)
    model.set_rope(*(table.to(device) for table in tables))


def empty_model(
    settings: Settings, geometry: Geometry, attend: AttentionFn, device: torch.device
) -> BasicLlama:
    """The model with its matrices as allocated; on device `meta` without any storage."""
    make = partial(KINDS[geometry.attention], geometry, attend, settings.model.infini)
    with device:
        return BasicLlama(
            geometry,
            make,
            segment_length=segment_length(settings),
            norm_eps=settings.model.rms_norm_eps,
            gradient_checkpointing=settings.training.gradient_checkpointing,
            loss_chunk_rows=loss_chunk_rows(settings, geometry.vocab_size, device.type),
        )


def build_shared(
    settings: Settings,
    geometry: Geometry,
    attend: AttentionFn,
    device: torch.device,
    share: Callable[[BasicLlama], None],
    lies_here: Callable[[Tensor], tuple[Tensor, int]],
) -> BasicLlama:
    """As build_model, of which only a part lies here: `share` gets it on device `meta` and leaves
    that part, undefined; `lies_here`: its values of a parameter, and the number of the first."""
    model = empty_model(settings, geometry, attend, torch.device("meta"))
    share(model)
    _set_tables(model, settings, geometry, device)
    initialise(model, settings.model, settings.system.seed, lies_here=lies_here)
    return model


def _all_lies_here(parameter: Tensor) -> tuple[Tensor, int]:
    return parameter.detach(), 0


@torch.no_grad()
def initialise(
    model: torch.nn.Module,
    settings: ModelSettings,
    seed: int,
    piece_numel: int = PIECE_NUMEL,
    lies_here: Callable[[Tensor], tuple[Tensor, int]] = _all_lies_here,
) -> None:
    """Overwrite every parameter: the values that lie here, and they are the same wherever others
    lie. All values are drawn on the CPU: the generator of a GPU could
    differ.

    `normal_` runs on one thread and takes 5 to 12 ns an element (2 billion: 10 to 20 s), so threads
    draw pieces in parallel. Each piece has a generator seeded by (seed, name, piece): values do not
    depend on the number of threads.
    """
    pieces: list[_Piece] = []
    for name, parameter in model.named_parameters():
        own, first = lies_here(parameter)
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
