"""The estimate of memory against what torch really keeps, and against a process that trains."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from model_check.config.memory import (
    advice,
    block_activations,
    estimate_memory,
)
from model_check.config.schema import Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.models.attention import BACKENDS
from model_check.models.build_model import build_model

Make = Callable[..., Settings]
ROOT = Path(__file__).parents[2]


def kept_bytes(settings: Settings) -> int:
    """What autograd holds after a forward pass: weights' 16-bit copies and activations."""
    shape = geometry(settings.model, 257)
    attend = BACKENDS[settings.model.attention_backend]
    model = build_model(settings, shape, attend, torch.device("cpu"))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    batch = torch.zeros(settings.training.batch_size, settings.training.context_length).long()
    half = settings.training.use_amp
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
    ):
        model(batch, batch)
    return sum(t.untyped_storage().nbytes() for place, t in held.items() if place not in own)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_block_keeps_what_is_estimated_within_two_percent(
    settings: Make, backend: str, half: bool
) -> None:
    training = {"use_amp": half, "batch_size": 2, "context_length": 128}
    one, two = (
        settings(training=training, num_layers=n, attention_backend=backend) for n in (1, 2)
    )
    shape, deeper = geometry(one.model, 257), geometry(two.model, 257)
    copies = 2 * (deeper.num_multiplied - shape.num_multiplied) if half else 0
    kept = kept_bytes(two) - kept_bytes(one) - copies
    assert kept == pytest.approx(block_activations(one, shape, "cpu"), rel=0.02)


TRAIN = """
import sys, torch
from model_check.config.load import Request, load
from model_check.config.shape import geometry
from model_check.config.memory import estimate_memory
from model_check.engine.metrics import peak_memory_bytes
from model_check.engine.optim import AdamW
from model_check.models.attention import BACKENDS
from model_check.models.build_model import build_model
torch.set_num_threads(1)
settings = load(Request(preset="cpu", overrides=tuple(sys.argv[1:])), lambda: False).settings
shape = geometry(settings.model, 0)
model = build_model(settings, shape, BACKENDS["sdpa"], torch.device("cpu"))
optimizer = AdamW(model.named_parameters(), settings.training)
batch = torch.zeros(settings.training.batch_size, settings.training.context_length).long()
for _ in range(2):
    optimizer.zero_grad()
    for _ in range(settings.training.grad_accum_nums):
        model(batch, batch).backward()
    optimizer.step(1e-3, torch.tensor(False), None)
print(estimate_memory(settings, "cpu").total / peak_memory_bytes())
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build takes more by itself")
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.vocab_size=32768", "training.context_length=512"),
        ("model.vocab_size=8192", "training.context_length=512", "training.grad_accum_nums=2"),
    ],
    ids=["one micro-batch", "two"],
)
def test_a_process_that_trains_takes_what_is_estimated_within_a_fifth(
    overrides: tuple[str, ...],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert float(done.stdout) == pytest.approx(1.0, abs=0.2)


def test_the_default_workload_fits_an_80_gib_gpu_and_its_parts_add_up() -> None:
    estimate = estimate_memory(Settings(), "cuda")
    assert estimate.weights == 4 * 1_923_125_248 + 2 * 1_397_751_808
    assert estimate.moments == 8 * 1_923_125_248
    parts = (estimate.weights, estimate.gradients, estimate.moments, estimate.activations)
    assert estimate.total == sum(parts) + estimate.temporaries + estimate.runtime
    assert 30 < estimate.total / 2**30 < 50
    assert estimate.describe().startswith(f"{estimate.total / 2**30:.1f} GiB: weights ")


@pytest.mark.parametrize(
    ("name", "less", "more"),
    [
        ("batch_size", 1, 2),
        ("context_length", 1024, 8192),
        ("gradient_checkpointing", True, False),
        ("loss_chunk_rows", 512, 8192),
        ("grad_accum_nums", 1, 2),
    ],
)
def test_every_way_out_that_is_advised_makes_it_smaller(name: str, less: int, more: int) -> None:
    small, large = (
        Settings(training=msgspec.structs.replace(TrainingSettings(), **{name: value}))
        for value in (less, more)
    )
    assert estimate_memory(small, "cuda").total < estimate_memory(large, "cuda").total


def test_advice_names_only_what_can_still_be_changed(settings: Make) -> None:
    text = advice(settings(training={"batch_size": 4, "gradient_checkpointing": True}))
    assert "training.batch_size (4)" in text
    assert "gradient_checkpointing" not in text
    assert "batch_size" not in advice(settings())
