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

from model_check.attention import backend
from model_check.config.load import Request, load
from model_check.config.memory import (
    advice,
    block_activations,
    estimate_memory,
    state_bytes,
)
from model_check.config.schema import (
    DataSettings,
    FsdpSettings,
    InfiniSettings,
    LaunchSettings,
    Settings,
    TrainingSettings,
)
from model_check.config.shape import geometry
from model_check.data.build.prepare import prepare
from model_check.events import Done, decode
from model_check.init import build_model
from model_check.utils.wire import EVENTS_FD
from model_check.utils.worker_env import TOKEN_CACHE
from tests.deadline import DEADLINE_S

Make = Callable[..., Settings]
ROOT = Path(__file__).parents[2]


def kept_bytes(settings: Settings) -> int:
    """What autograd holds after a forward pass: weights' 16-bit copies and activations."""
    shape = geometry(settings.model, 257)
    attend = backend(settings.model.attention_backend)
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
        documents = (torch.arange(batch.shape[1]) > 50).long().expand_as(batch)
        model.summed_loss(batch, batch, documents if settings.data.document_masking else None)
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
@pytest.mark.parametrize("masked", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_block_keeps_what_is_estimated_within_three_percent(
    settings: Make, model: dict[str, Any], half: bool, masked: bool
) -> None:
    training = {"use_amp": half, "batch_size": 2, "context_length": 128}
    one, two = (settings(training=training, num_layers=n, **model) for n in (1, 2))
    data = DataSettings(document_masking=masked)
    one, two = (msgspec.structs.replace(each, data=data) for each in (one, two))
    shape, deeper = geometry(one.model, 257), geometry(two.model, 257)
    copies = 2 * (deeper.num_multiplied - shape.num_multiplied) if half else 0
    kept = kept_bytes(two) - kept_bytes(one) - copies
    assert kept == pytest.approx(block_activations(one, shape, "cpu"), rel=0.03)


TINY = ("model.geometry=tiny", "training.use_amp=false")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting that names it; its tokens are cached beside it."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "text.txt").write_text(" ".join(map(str, range(20_000))))
    return f"data.dataset={directory}/text.txt"


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
    try:
        with ours, ours.makefile("rb") as lines:
            *_, last = map(decode, lines)
        assert worker.wait(DEADLINE_S) == 0
    finally:
        worker.kill()
        worker.wait()
    assert isinstance(last, Done)
    return last.peak_memory_bytes


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build takes more by itself")
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.grad_accum_nums=2",),
        # Of few tokens: a processor without products in 16 bits takes 100 times as long.
        ("training.use_amp=true", "training.context_length=128"),
        pytest.param(
            (*TINY, "training.batch_size=4", "training.gradient_checkpointing=true"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("data.document_masking=true",), marks=pytest.mark.slow),
        pytest.param(("model.attention_backend=eager",), marks=pytest.mark.slow),
        pytest.param(("model.attention=infini",), marks=pytest.mark.slow),
        pytest.param((*TINY, "training.batch_size=8"), marks=pytest.mark.slow),
    ],
    ids=["two micro-batches", "bf16", "recomputed", "documents", "eager", "infini", "tiny"],
)
def test_a_worker_takes_about_what_is_estimated(
    tmp_path: Path, text: str, overrides: tuple[str, ...]
) -> None:
    asked = (
        *("data.tokenizer=bpe", "data.bpe_vocab_size=400", "model.vocab_size=8192", text),
        *("training.max_steps=1", "system.num_threads=1", "training.context_length=512"),
        *overrides,
    )
    settings = load(Request(preset="cpu", overrides=asked), lambda: False).settings
    ratio = estimate_memory(settings, "cpu").total / peak_of_a_worker(settings, tmp_path)
    # 0.89 to 1.04 on three kinds of processors: which libraries and kernels it has decides.
    assert ratio == pytest.approx(1.0, abs=0.15)


def test_the_default_workload_fits_an_80_gib_gpu_and_its_parts_add_up() -> None:
    estimate = estimate_memory(Settings(), "cuda")
    assert estimate.weights == 4 * 1_923_125_248 + 2 * 1_397_751_808
    assert estimate.moments == 8 * 1_923_125_248
    parts = (estimate.weights, estimate.gradients, estimate.moments, estimate.activations)
    assert estimate.total == sum(parts) + estimate.temporaries + estimate.runtime
    assert estimate.unused == 0
    assert 30 < estimate.total / 2**30 < 50
    assert estimate.describe().startswith(f"{estimate.total / 2**30:.1f} GiB: weights ")


def test_a_rank_that_shares_the_model_takes_its_shard_and_what_it_gathers() -> None:
    launch = msgspec.structs.replace(LaunchSettings(), mode="fsdp")
    settings = Settings(launch=launch)
    whole, shared = (estimate_memory(settings, "cuda", ranks) for ranks in (1, 8))
    assert shared.moments == whole.moments // 8
    assert shared.weights == shared.gradients == 4 * 1_923_125_248 // 8
    assert whole.gathered == 0
    assert state_bytes(settings, 8) == 2 * 1_923_125_248
    halves = msgspec.structs.replace(launch, fsdp=FsdpSettings(shard_size=4))
    assert estimate_memory(Settings(launch=halves), "cuda", 8).weights == 2 * shared.weights
    offload = msgspec.structs.replace(launch, fsdp=FsdpSettings(cpu_offload=True))
    assert estimate_memory(Settings(launch=offload), "cuda", 8).moments == 0
    assert estimate_memory(Settings(launch=offload), "cpu", 8).moments == shared.moments


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [None, 512, 8192])
@pytest.mark.parametrize("half", ["fp32", "bf16"])
def test_a_compiled_run_is_counted_with_room_to_turn_eager(
    half: Any, rows: int | None, device: str
) -> None:
    """The trial of compiled code may fail: what was told before the start must hold then, too."""
    # So narrow that no block's backward pass hides the logits.
    model = msgspec.structs.replace(Settings().model, intermediate_size=256)
    training = TrainingSettings(precision=half, loss_chunk_rows=rows, context_length=8192)
    eager = Settings(model=model, training=training)
    compiled = msgspec.structs.replace(
        eager, training=msgspec.structs.replace(training, compile=True)
    )
    alone, turned = (estimate_memory(each, device) for each in (eager, compiled))
    assert turned.temporaries >= alone.temporaries
    if rows == 8192:
        logits = rows * 128_256 * (8 if half == "fp32" else 10)
        assert alone.temporaries == turned.temporaries == logits


def test_advice_names_only_what_can_still_be_changed(settings: Make) -> None:
    text = advice(settings(training={"batch_size": 4, "gradient_checkpointing": True}))
    assert "training.batch_size (4)" in text
    assert "gradient_checkpointing" not in text
    assert "batch_size" not in advice(settings())
