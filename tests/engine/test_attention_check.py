"""What a backend says of itself is not believed: it is tried."""

import importlib
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_check import kernels
from model_check.attention import HALF, backend, eager, sdpa
from model_check.config.memory import estimate_memory
from model_check.config.schema import DataSettings, ModelSettings, Settings, TrainingSettings
from model_check.engine.kernels import (
    KernelNeeds,
    NoKernel,
    choose_attention,
    described_candidates,
)
from model_check.errors import ConfigError
from model_check.kernels import AttentionShape, try_attention
from model_check.utils.trials import PASSED, trial_of
from tests.engine.flash_faults import FAULTS, write_flash

CPU, SHAPE = torch.device("cpu"), AttentionShape(4, 2, 16, 32)
FLASH = "flash_attn/__init__.py"
PLAIN = ("eager", "sdpa")


class OnHopper(KernelNeeds):
    """What is wanted of an H100, of tensors that this machine has."""

    kind = "cuda"
    capability = (9, 0)


def needs(*, deterministic: bool = True) -> KernelNeeds:
    return OnHopper(CPU, torch.bfloat16, deterministic=deterministic, documents=False)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for module in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ["auto", "flash_attn"])
@pytest.mark.parametrize("said", FAULTS)
def test_a_kernel_that_errs_is_told_and_another_one_is_taken(
    packages: Path, said: str, name: str
) -> None:
    write_flash(packages / FLASH, **FAULTS[said])
    chosen = choose_attention(name, needs(), SHAPE, {})
    assert chosen.kernel == "ScaledDotProductFlashAttentionForCpu"
    assert list(chosen.trials) == [
        trial_of(f"attention kernel {n}") for n in ("flash_attn", "sdpa")
    ]
    failure, passed = chosen.trials.values()
    assert said in failure
    assert passed == PASSED


def test_a_kernel_that_errs_is_refused_where_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def spoilt(*inputs: Tensor, **options: Any) -> Tensor:
        return attend(*inputs, **options) * 1.2

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spoilt)
    said = "gave out that is off by 0.2 of its size (0.05 is allowed)"
    with pytest.raises(NoKernel, match=r"in its trial at the start it .*; set mo") as raised:
        choose_attention("sdpa", needs(), SHAPE, {})
    assert said in str(raised.value)
    assert raised.value.trials == {"trial of attention kernel sdpa": said}


def test_a_kernel_that_passes_is_taken_though_bits_are_compared(packages: Path) -> None:
    write_flash(packages / FLASH)
    chosen = choose_attention("auto", needs(), SHAPE, {})
    assert chosen.name == "flash_attn"
    assert chosen.trials == {"trial of attention kernel flash_attn": PASSED}
    assert "the same bits each time in its trial" in chosen.reason


def test_other_bits_matter_only_where_bits_are_compared(packages: Path) -> None:
    write_flash(packages / FLASH, **FAULTS["other bits of dk"])
    assert choose_attention("auto", needs(deterministic=False), SHAPE, {}).name == "flash_attn"


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", PLAIN)
def test_torchs_own_kernels_pass(name: str, dtype: torch.dtype, documents: bool) -> None:
    options = {"deterministic": True, "documents": documents}
    before = torch.get_rng_state()
    tried = try_attention(backend(name), SHAPE, CPU, dtype, **options)
    assert tried.obstacle is None
    assert tried.kernel == ("ScaledDotProductFlashAttentionForCpu" if name == "sdpa" else None)
    assert torch.equal(torch.get_rng_state(), before)


def test_want_of_memory_is_no_fault_of_a_kernel() -> None:
    def greedy(*_: Tensor | None) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Another process has 78 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        try_attention(greedy, SHAPE, CPU, torch.float32, deterministic=True, documents=False)


def test_candidates_tell_their_packages(packages: Path) -> None:
    write_flash(packages / FLASH)
    assert described_candidates("auto", needs()) == "flash_attn of flash_attn, sdpa, eager"
    assert described_candidates("sdpa", needs()) == "sdpa"


def test_a_mask_that_is_ignored_is_noticed() -> None:
    def deaf(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        return sdpa(q, k, v)

    tried = try_attention(deaf, SHAPE, CPU, torch.float32, deterministic=True, documents=True)
    assert "out that is off by" in str(tried.obstacle)


@pytest.mark.parametrize("head", range(4))
def test_one_head_that_is_wrong_is_noticed(head: int) -> None:
    """Where a kernel spreads query heads over keys otherwise, some heads come out right."""

    def partly(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        out = sdpa(q, k, v, visible)
        spoilt = torch.zeros_like(out)
        spoilt[:, head] = 1
        return out + spoilt

    tried = try_attention(partly, SHAPE, CPU, torch.float32, deterministic=True, documents=False)
    assert "out that is off by" in str(tried.obstacle)


@pytest.fixture
def cudnn_switch() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_masked_run_never_meets_cudnn(cudnn_switch: None) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    for documents in (False, True):
        wanted = KernelNeeds(CPU, torch.float32, deterministic=False, documents=documents)
        choose_attention("sdpa", wanted, SHAPE, {})
        assert torch.backends.cuda.cudnn_sdp_enabled() != documents


def test_who_switched_cudnn_off_is_heeded(cudnn_switch: None) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    backend("sdpa")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_device_that_spoils_the_definition_too_proves_nothing_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "eager", lambda *inputs: eager(*inputs) * torch.nan)
    options = {"deterministic": True, "documents": False}
    tried = try_attention(sdpa, SHAPE, CPU, torch.float32, **options)
    assert "out that is off by nan" in str(tried.obstacle)


def test_kernels_are_tried_with_the_strides_of_a_block() -> None:
    strides = []

    def seen(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        strides.append([x.transpose(1, 2).is_contiguous() for x in (q, k, v)])
        return sdpa(q, k, v, visible)

    try_attention(seen, SHAPE, CPU, torch.float32, deterministic=False, documents=False)
    assert all(all(of_call) for of_call in strides)


@pytest.mark.parametrize("time", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("documents", [False, True])
def test_the_shortest_contexts_raise_no_false_alarm(
    dtype: torch.dtype, time: int, documents: bool
) -> None:
    """Of few rows all may cancel: nothing is left but their rounding."""
    options = {"deterministic": True, "documents": documents}
    heads = [(8, 2, 128), (1, 1, 212), (1, 1, 322), (4, 4, 322), (16, 16, 4)]
    for shape in (AttentionShape(*sizes, time) for sizes in heads):
        for name in PLAIN:
            tried = try_attention(backend(name), shape, CPU, dtype, **options)
            assert tried.obstacle is None, (name, shape)


def test_many_narrow_heads_raise_no_false_alarm() -> None:
    options = {"deterministic": True, "documents": False}
    for sizes in ((7, 7, 2, 16), (15, 5, 2, 100), (16, 16, 4, 5), (64, 64, 2, 64)):
        tried = try_attention(sdpa, AttentionShape(*sizes), CPU, torch.bfloat16, **options)
        assert tried.obstacle is None, sizes


def test_a_device_tries_no_more_than_it_has_time_and_memory_for() -> None:
    wide, cuda = AttentionShape(32, 8, 128, 8192), torch.device("cuda")
    assert wide.tried_time(CPU) == 128
    assert wide.tried_time(cuda) == 2048
    assert AttentionShape(8, 4, 32, 256).tried_time(CPU) == 256
    narrow = AttentionShape(3, 1, 2, 8192)  # its scores, not its products, take the time
    assert narrow.tried_time(CPU) == 512


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            number, size = id(storage), storage.nbytes()
            if number not in self.alive:
                self.now, self.most = self.now + size, max(self.most, self.now + size)
                gone = partial(self.free, number, size)
                self.alive[number] = weakref.ref(storage, gone)
        return out

    def free(self, number: int, size: int, _: object) -> None:
        del self.alive[number]
        self.now -= size


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("heads", [(8, 4, 64), (8, 1, 128), (32, 1, 16)], ids=str)
def test_a_check_takes_no_more_memory_than_the_smallest_training(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], name: str, documents: bool
) -> None:
    """One block of that attention, one sequence of those positions."""
    monkeypatch.setattr(kernels, "CPU_PRODUCTS", 2**60)  # as much as on a GPU
    num_heads, num_kv_heads, head_dim = heads
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, 512)
    with Allocated() as allocated:
        options = {"deterministic": True, "documents": documents}
        assert not try_attention(backend(name), shape, CPU, torch.bfloat16, **options).obstacle
    settings = Settings(
        model=ModelSettings(
            num_layers=1,
            hidden_size=num_heads * head_dim,
            intermediate_size=num_heads * head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            vocab_size=4096,
            attention_backend=name,
        ),
        training=TrainingSettings(context_length=512),
        data=DataSettings(document_masking=documents),
    )
    estimate = estimate_memory(settings, "cuda")
    assert allocated.most < estimate.total - estimate.runtime
    assert allocated.now == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "flash_attn", "sdpa"])
def test_what_this_gpu_has_passes_or_says_why(name: str) -> None:
    torch.set_deterministic_debug_mode("default" if name == "cudnn" else "error")
    try:
        wanted = KernelNeeds(torch.device("cuda"), torch.bfloat16, deterministic=name != "cudnn")
        chosen = choose_attention(name, wanted, AttentionShape(32, 8, 128, 8192), {})
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        torch.set_deterministic_debug_mode("default")
    assert chosen.kernel not in (None, "math")
