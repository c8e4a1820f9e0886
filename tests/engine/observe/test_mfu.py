"""FLOPs a token, held against torch's own count; MFU only where a peak is known."""

from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model_check.config.schema import ModelSettings, Settings, TrainingSettings
from model_check.config.shape import Geometry, geometry
from model_check.engine.observe.mfu import FlopsPerToken, Utilisation, flops_per_token, peak_flops
from model_check.models.attention import BACKENDS
from model_check.models.build_model import empty_model
from model_check.models.rope import rope_tables

INFINI = [{"attention": "infini", "infini": {"update": update}} for update in ("linear", "delta")]
DEFAULT = geometry(ModelSettings(), tokenizer_vocab_size=128256)


def test_the_default_workload_has_the_documented_flops() -> None:
    flops = flops_per_token(Settings(), DEFAULT)
    assert flops.full == 9_997_123_584
    assert flops.causal == pytest.approx(9.192e9, rel=1e-4)


def counted(settings: Settings, shape: Geometry) -> int:
    """Of one forward and backward pass of one sequence, on the meta device."""
    meta, time = torch.device("meta"), settings.training.context_length
    model = empty_model(settings, shape, BACKENDS["eager"], meta)
    model.set_rope(*(t.to(meta) for t in rope_tables(torch.ones(shape.head_dim // 2), time)))
    with FlopCounterMode(display=False) as counter:
        model.logits(torch.zeros(1, time, dtype=torch.long, device=meta)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [False, True])
def test_the_full_convention_is_what_torch_counts(tied: bool) -> None:
    shape = Geometry(2, 64, 172, 4, 2, 16, 301, tied)
    settings = Settings(training=TrainingSettings(context_length=32))
    assert counted(settings, shape) == 32 * flops_per_token(settings, shape).full


@pytest.mark.parametrize("changes", [{"attention": "local"}, *INFINI], ids=str)
def test_segments_count_as_torch_counts_them(changes: dict[str, Any]) -> None:
    given = {"num_layers": 2, "hidden_size": 64, "num_heads": 1, "num_kv_heads": 1, **changes}
    model = msgspec.convert({"intermediate_size": 64, "vocab_size": 32, **given}, ModelSettings)
    settings = Settings(model=model, training=TrainingSettings(context_length=256))
    shape = geometry(model, 32)
    ratio = counted(settings, shape) / (256 * flops_per_token(settings, shape).full)
    assert ratio == pytest.approx(1.0, abs=0.04 if shape.attention == "infini" else 0.0)


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
