"""Settings -> a model on its device, with the same first weights on every device and machine."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat

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
    frequencies = inverse_frequencies(
        geometry.head_dim, settings.model.rope_theta, settings.model.rope_scaling
    )
    tables = rope_tables(frequencies, settings.training.context_length)
    model.set_rope(*(table.to(device) for table in tables))
    return model


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


@torch.no_grad()
def initialise(
    model: torch.nn.Module, settings: ModelSettings, seed: int, piece_numel: int = PIECE_NUMEL
) -> None:
    """Overwrite every parameter. All values are drawn on the CPU: the generator of a GPU could
    differ.

    `normal_` runs on one thread and takes 5 to 12 ns an element (2 billion: 10 to 20 s), so threads
    draw pieces in parallel. Each piece has a generator seeded by (seed, name, piece): values do not
    depend on the number of threads.
    """
    pieces: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if (value := shape.parameter(name).initial(settings)) is not None:
            parameter.fill_(value)
        else:
            parts = torch.split(parameter.detach().view(-1), piece_numel)
            pieces |= {f"{seed}:{name}:{n}": part for n, part in enumerate(parts)}
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(_draw, pieces, pieces.values(), repeat(settings.init_std)))


def _draw(key: str, target: Tensor, std: float) -> None:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    target.copy_(torch.empty(target.shape).normal_(0.0, std, generator=generator))
