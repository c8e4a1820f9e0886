"""The estimate of memory against what torch really keeps, and against a process that trains."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from model_check.config.load import Request, load
from model_check.config.memory import (
    advice,
    block_activations,
    estimate_memory,
)
from model_check.config.schema import InfiniSettings, Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.data.build.prepare import prepare
from model_check.events import Done, decode
from model_check.models.attention import BACKENDS
from model_check.models.build_model import build_model
from model_check.utils.worker_env import EVENTS_FD, TOKEN_CACHE

Make = Callable[..., Settings]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 100


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


INFINI = {"attention": "infini", "infini": InfiniSettings(segment_length=32)}
DELTA = {"attention": "infini", "infini": InfiniSettings(segment_length=16, update="delta")}


@pytest.mark.parametrize(
    "model",
    [
        {"attention_backend": "sdpa"},
        {"attention_backend": "eager"},
        {"attention_backend": "sdpa", "attention": "local"},
        {"attention_backend": "eager", "attention": "local"},
        {"attention_backend": "sdpa", **INFINI},
        {"attention_backend": "sdpa", **DELTA},
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_block_keeps_what_is_estimated_within_two_percent(
    settings: Make, model: dict[str, Any], half: bool
) -> None:
    training = {"use_amp": half, "batch_size": 2, "context_length": 128}
    one, two = (settings(training=training, num_layers=n, **model) for n in (1, 2))
    shape, deeper = geometry(one.model, 257), geometry(two.model, 257)
    copies = 2 * (deeper.num_multiplied - shape.num_multiplied) if half else 0
    kept = kept_bytes(two) - kept_bytes(one) - copies
    assert kept == pytest.approx(block_activations(one, shape, "cpu"), rel=0.02)


TINY = ("model.geometry=tiny", "training.context_length=512", "training.use_amp=false")


def peak_of_a_worker(settings: Settings, directory: Path) -> int:
    """Bytes that a real worker took at most, as its last event tells. Its data were prepared
    before, as the launcher does it."""
    config = directory / "settings.json"
    config.write_bytes(msgspec.json.encode(settings))
    cache = prepare(settings, print).path
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_main.py"), "--config", str(config)],
            env={**os.environ, EVENTS_FD: str(theirs.fileno()), TOKEN_CACHE: str(cache)},
            cwd=directory,
            pass_fds=[theirs.fileno()],
        )
    with ours, ours.makefile("rb") as lines:
        *_, last = map(decode, lines)
    assert worker.wait(DEADLINE_S) == 0
    assert isinstance(last, Done)
    return last.peak_memory_bytes


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build takes more by itself")
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.context_length=512",),
        ("training.context_length=512", "training.grad_accum_nums=2"),
        (*TINY, "training.batch_size=8"),
        (*TINY, "training.batch_size=8", "training.gradient_checkpointing=true"),
    ],
    ids=["one micro-batch", "two", "tiny", "recomputed"],
)
@pytest.mark.timeout(600)  # 40 s where nothing else runs
def test_a_worker_takes_what_is_estimated_within_a_sixth(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(20_000))))
    asked = (
        *("data.tokenizer=bpe", "data.bpe_vocab_size=400", "model.vocab_size=8192"),
        *(f"data.dataset={text}", f"data.cache_dir={tmp_path}/cache"),
        *("training.max_steps=3", "system.num_threads=1", *overrides),
    )
    settings = load(Request(preset="cpu", overrides=asked), lambda: False).settings
    ratio = estimate_memory(settings, "cpu").total / peak_of_a_worker(settings, tmp_path)
    assert ratio == pytest.approx(1.0, abs=1 / 6)


def test_the_default_workload_fits_an_80_gib_gpu_and_its_parts_add_up() -> None:
    estimate = estimate_memory(Settings(), "cuda")
    assert estimate.weights == 4 * 1_923_125_248 + 2 * 1_397_751_808
    assert estimate.moments == 8 * 1_923_125_248
    parts = (estimate.weights, estimate.gradients, estimate.moments, estimate.activations)
    assert estimate.total == sum(parts) + estimate.temporaries + estimate.runtime
    assert estimate.unused == 0
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
