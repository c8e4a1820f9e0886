"""First weights: the same whatever the thread count, as wide as init_std says."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from model_check.config.schema import ModelSettings
from model_check.init import initialise
from model_check.model import Llama

Tiny = Callable[..., Llama]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_same_seed_gives_the_same_bits_on_any_number_of_threads(
    tiny: Tiny, threads: Callable[[int], None]
) -> None:
    alone, together = tiny(), tiny()
    for model, count in ((alone, 1), (together, 4)):
        threads(count)
        # Many pieces, as a large model has.
        initialise(model, ModelSettings(), seed=7, piece_numel=1000)
    weights = together.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in alone.state_dict().items())


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_a_shard_has_the_bits_of_the_whole(tiny: Tiny, num_shards: int) -> None:
    """Each draws the pieces that it lies in; some lie in several, and some hold nothing."""
    whole = dict(tiny().named_parameters())
    settings = ModelSettings()
    initialise(tiny_whole := tiny(), settings, seed=7, piece_numel=1000)
    wanted = {name: value.detach().flatten() for name, value in tiny_whole.named_parameters()}
    for number in range(num_shards):
        parts: dict[int, torch.Tensor] = {}

        def local_shard(
            parameter: torch.Tensor, number: int = number, parts: Any = parts
        ) -> tuple[torch.Tensor, int]:
            rows = -(-len(parameter) // num_shards)
            first = min(len(parameter), number * rows)
            own = torch.full_like(parameter[first : first + rows], torch.nan)
            parts[len(parts)] = own
            return own, first * (parameter.numel() // len(parameter))

        initialise(tiny(), settings, seed=7, piece_numel=1000, local_shard=local_shard)
        for own, (name, parameter) in zip(parts.values(), whole.items(), strict=True):
            rows = -(-len(parameter) // num_shards) * (parameter.numel() // len(parameter))
            first = min(parameter.numel(), number * rows)
            assert torch.equal(own.flatten(), wanted[name][first : first + own.numel()])


def test_another_seed_gives_other_weights(tiny: Tiny) -> None:
    assert not torch.equal(tiny().tok_embed.weight, tiny(seed=43).tok_embed.weight)


def test_no_two_matrices_are_alike(tiny: Tiny) -> None:
    first, second = tiny().layers
    assert not torch.equal(
        first.attention.wq.weight,  # type: ignore[union-attr,arg-type]
        second.attention.wq.weight,  # type: ignore[union-attr,arg-type]
    )


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_init_std_is_the_deviation_of_every_matrix(tiny: Tiny, std: float) -> None:
    for name, parameter in tiny(init_std=std).named_parameters():
        if parameter.ndim < 2:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert parameter.mean().item() == pytest.approx(0.0, abs=std / 10), name
