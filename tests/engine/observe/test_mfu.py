"""FLOPs a token, held against torch's own count; MFU only where a peak is known."""

from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model_check.attention import eager
from model_check.config.derived import attention_span
from model_check.config.flops import FlopsPerToken, flops_per_token
from model_check.config.schema import ModelSettings, Settings, TrainingSettings
from model_check.config.shape import Geometry, geometry
from model_check.hooks.observe.mfu import Utilisation, peak_flops
from model_check.init import empty_model

INFINI = [{"attention": "infini", "infini": {"update": update}} for update in ("linear", "delta")]
DEFAULT = geometry(ModelSettings(), tokenizer_vocab_size=128256)


def test_the_default_workload_has_the_documented_flops() -> None:
    flops = flops_per_token(Settings(), DEFAULT)
    assert flops.full == 9_997_123_584
    assert flops.causal == pytest.approx(9.192e9, rel=1e-4)


def counted(settings: Settings, shape: Geometry) -> int:
    """Of one forward and backward pass of one sequence, on the meta device."""
    meta, time = torch.device("meta"), settings.training.context_length
    model = empty_model(settings, shape, eager, meta)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, time, dtype=torch.long, device=meta)).sum().backward()
    return counter.get_total_flops()


def beyond(settings: Settings, shape: Geometry) -> int:
    """What torch counts of Infini-attention's memory, and the convention does not, of a sequence:
    divisors, and sums over segments; less the reads and writes that the delta rule's first and last
    segment have no gradient of."""
    if shape.attention != "infini":
        return 0
    time, length = settings.training.context_length, attention_span(settings)
    segments = time // length
    heads, groups, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    divisors = 6 * time * heads * width
    sums = 4 * segments**2 * groups * width
    if settings.model.infini.update == "linear":
        return shape.num_layers * (divisors + sums * (1 + width))
    of_segment = length * groups * width
    divisors += (6 * segments - 2 - 4) * of_segment
    # The first reads an empty memory, whose gradient nobody wants; what the last writes, nobody
    # reads.
    missing = (2 + 8) * of_segment * width
    return shape.num_layers * (divisors + sums - missing)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("changes", [{}, {"attention": "local"}, *INFINI], ids=str)
def test_every_kind_of_attention_counts_as_torch_counts_it(
    changes: dict[str, Any], heads: tuple[int, int], tied: bool
) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 172, "vocab_size": 301}
    named = {"num_heads": heads[0], "num_kv_heads": heads[1], "tie_word_embeddings": tied}
    model = msgspec.convert({**sizes, **named, **changes}, ModelSettings)
    settings = Settings(model=model, training=TrainingSettings(context_length=64))
    shape = geometry(model, 301)
    convention = 64 * flops_per_token(settings, shape).full
    assert counted(settings, shape) == convention + beyond(settings, shape)


@pytest.mark.parametrize("kind", ["local", "infini"])
def test_the_default_workload_of_each_kind_is_what_torch_counts(kind: str) -> None:
    model = msgspec.convert({"attention": kind, "vocab_size": 128256}, ModelSettings)
    settings = Settings(model=model)
    shape = geometry(model, 128256)
    convention = 8192 * flops_per_token(settings, shape).full
    extra = beyond(settings, shape)
    assert counted(settings, shape) == convention + extra
    assert extra < 0.005 * convention


def test_the_default_workload_is_what_torch_counts() -> None:
    assert counted(Settings(), DEFAULT) == 8192 * flops_per_token(Settings(), DEFAULT).full


def test_a_device_that_is_not_in_the_table_has_no_mfu() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16) is None
    unknown = Utilisation(FlopsPerToken(10e9, 9e9), None)
    assert unknown.full(1e4) is None
    assert unknown.describe(1e4) == "n/a"


def test_mfu_is_the_models_flops_over_the_peak_and_names_its_convention() -> None:
    known = Utilisation(FlopsPerToken(full=10e9, causal=9e9), peak=1e15)
    assert known.full(60_000) == pytest.approx(0.6)
    assert known.describe(60_000) == "60.0% (full attention), 54.0% (causal)"
    assert known.full(None) is None
