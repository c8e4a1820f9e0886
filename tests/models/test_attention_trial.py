"""What a backend says of itself is not believed: it is tried."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_check.errors import ConfigError
from model_check.models import attention_trial
from model_check.models.attention import BACKENDS, HALF, bound, eager, sdpa
from model_check.models.attention_trial import AttentionShape, try_attention
from model_check.models.backends import (
    KernelNeeds,
    NoKernel,
    choose_attention,
    described_candidates,
    needs_of,
)
from model_check.utils.trials import PASSED, trial_of
from tests.models.flash_faults import FAULTS, write_flash

CPU, SHAPE = torch.device("cpu"), AttentionShape(4, 2, 16, 32)
INTERFACE, FLASH_2 = "flash_attn_interface.py", "flash_attn/__init__.py"


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


@pytest.mark.parametrize("said", FAULTS)
def test_a_kernel_that_errs_is_told_and_another_one_is_taken(packages: Path, said: str) -> None:
    write_flash(packages / INTERFACE, **FAULTS[said])
    write_flash(packages / FLASH_2)
    chosen = choose_attention("auto", needs(), SHAPE)
    assert chosen.name == "flash_attn_2"
    assert list(chosen.trials) == [trial_of(f"attention kernel flash_attn_{n}") for n in (3, 2)]
    failure, passed = chosen.trials.values()
    assert said in failure
    assert passed == PASSED


@pytest.mark.parametrize("said", FAULTS)
def test_a_kernel_that_errs_is_refused_where_it_was_named(packages: Path, said: str) -> None:
    write_flash(packages / INTERFACE, **FAULTS[said])
    with pytest.raises(NoKernel, match=r"in its trial at the start it .*; set mo") as raised:
        choose_attention("flash_attn_3", needs(), SHAPE)
    assert said in str(raised.value)
    assert said in raised.value.trials["trial of attention kernel flash_attn_3"]


def test_a_kernel_that_passes_is_taken_though_bits_are_compared(packages: Path) -> None:
    write_flash(packages / INTERFACE)
    chosen = choose_attention("auto", needs(), SHAPE)
    assert chosen.name == "flash_attn_3"
    assert chosen.trials == {"trial of attention kernel flash_attn_3": PASSED}
    assert "the same bits each time in its trial" in chosen.reason


def test_other_bits_matter_only_where_bits_are_compared(packages: Path) -> None:
    write_flash(packages / INTERFACE, **FAULTS["other bits of dk"])
    assert choose_attention("auto", needs(deterministic=False), SHAPE).name == "flash_attn_3"


def test_flash_attn_falls_back_to_a_kernel_of_torch(packages: Path) -> None:
    for file in (INTERFACE, FLASH_2):
        write_flash(packages / file, **FAULTS["out that is off by 0.2"])
    chosen = choose_attention("flash_attn", needs(), SHAPE)
    assert (chosen.name, len(chosen.trials)) == ("sdpa", 3)
    assert chosen.kernel == "ScaledDotProductFlashAttentionForCpu"


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", BACKENDS)
def test_torchs_own_kernels_pass(name: str, dtype: torch.dtype, documents: bool) -> None:
    options = {"deterministic": True, "documents": documents}
    before = torch.get_rng_state()
    tried = try_attention(bound(name), SHAPE, CPU, dtype, **options)
    assert tried.obstacle is None
    assert tried.kernel == ("ScaledDotProductFlashAttentionForCpu" if name == "sdpa" else None)
    assert torch.equal(torch.get_rng_state(), before)


def test_want_of_memory_is_no_fault_of_a_kernel() -> None:
    def greedy(*_: Tensor | None) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Another process has 78 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        try_attention(greedy, SHAPE, CPU, torch.float32, deterministic=True, documents=False)


def test_candidates_tell_their_packages(packages: Path) -> None:
    write_flash(packages / FLASH_2)
    assert described_candidates("auto", needs()) == "flash_attn_2 of flash_attn, sdpa, eager"
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
        choose_attention("sdpa", wanted, SHAPE)
        assert torch.backends.cuda.cudnn_sdp_enabled() != documents


def test_who_switched_cudnn_off_is_heeded(cudnn_switch: None) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    bound("sdpa")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_device_that_spoils_the_definition_too_proves_nothing_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_trial, "eager", lambda *inputs: eager(*inputs) * torch.nan)
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
        for name in BACKENDS:
            tried = try_attention(bound(name), shape, CPU, dtype, **options)
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
    of_one_group = AttentionShape(128, 1, 128, 8192)  # the definition's scores: 2 GiB a tensor
    assert of_one_group.tried_time(cuda) == 1024


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn_4", "flash_attn_3", "cudnn", "flash_attn_2", "sdpa"])
def test_what_this_gpu_has_passes_or_says_why(name: str) -> None:
    torch.set_deterministic_debug_mode("default" if name == "cudnn" else "error")
    try:
        wanted = needs_of(torch.device("cuda"), torch.bfloat16)
        chosen = choose_attention(name, wanted, AttentionShape(32, 8, 128, 8192))
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        torch.set_deterministic_debug_mode("default")
    assert chosen.kernel not in (None, "math")
