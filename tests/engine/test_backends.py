"""The choice of an attention backend: what it says, and what FlashAttention is given."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from model_check.attention import backend, eager
from model_check.config.backends import BACKENDS, HOPPER, backend_conflict, flash_fallback
from model_check.config.load import Request, load
from model_check.config.resume import known_settings
from model_check.config.schema import Settings
from model_check.engine.kernels import KernelNeeds, candidates_for
from model_check.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CAPABILITIES = (7, 5), (8, 0), (9, 0), (10, 0)
MISSING = "flash_attn is not installed (pip install flash-attn --no-build-isolation)"

PACKAGE = """
calls = []

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, deterministic=False):
    calls.append({"shape": tuple(q.shape), "causal": causal, "deterministic": deterministic})
    from model_check.attention import eager
    return eager(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
"""
"""A FlashAttention that computes with our definition: what matters is how it is called."""


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "flash_attn" / "__init__.py"
    path.parent.mkdir()
    path.write_text(PACKAGE)
    yield path
    sys.modules.pop("flash_attn", None)


class OnHopper(KernelNeeds):
    """What is wanted of an H100, wherever the test runs."""

    capability = HOPPER


def needs(
    device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> OnHopper:
    return OnHopper(device, dtype, **{"deterministic": True} | more)


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_is_called_in_its_own_way(package: Path, deterministic: bool) -> None:
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    attend = backend("flash_attn", deterministic=deterministic)
    assert torch.equal(attend(q, k, v, None), eager(q, k, v))
    call = {"shape": (2, 8, 4, 16), "causal": True, "deterministic": deterministic}
    assert sys.modules["flash_attn"].calls == [call]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_row_names_the_function_that_makes_it(package: Path, name: str) -> None:
    order = torch._C._get_sdp_priority_order()
    try:
        assert callable(backend(name))
    finally:
        torch._C._set_sdp_priority_order(order)


def test_auto_on_a_gpu_tries_flash_attention_where_bits_are_compared(package: Path) -> None:
    for name in ("auto", "flash_attn"):
        assert candidates_for(name, needs())[0] == ["flash_attn", "sdpa", "eager"]
    assert candidates_for("auto", needs(CPU))[0] == ["sdpa", "eager"]
    assert "CUDA" in candidates_for("auto", needs(CPU))[1]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"dtype": torch.float32}, "use_amp=true"),
        ({"documents": True}, "takes no mask"),
        ({"head_dim": 257}, "heads of at most 256 numbers, not 257"),
        ({"compiled": True}, "it registers no operator (pip install -U flash-attn: 2.7"),
    ],
)
def test_what_flash_attention_cannot_do_leaves_kernels_of_torch(
    package: Path, asked: dict[str, Any], why: str
) -> None:
    for name in ("auto", "flash_attn"):
        names, reason = candidates_for(name, needs(**asked))
        assert names == ["sdpa", "eager"]
        assert why in reason


def test_a_compiled_run_takes_what_torch_compile_keeps(package: Path) -> None:
    """An operator is what flash-attn registers from 2.7 on."""
    space = torch.library.Library("flash_attn", "FRAGMENT")
    try:
        space.define("_flash_attn_forward(Tensor q) -> Tensor")
        assert candidates_for("auto", needs(compiled=True))[0][0] == "flash_attn"
    finally:
        space._destroy()
        del torch.ops.flash_attn


def test_a_broken_package_is_no_missing_one(package: Path) -> None:
    package.write_text("raise ImportError('undefined symbol: x')")
    reason = candidates_for("flash_attn", needs())[1]
    assert (
        reason == "instead of flash_attn: flash_attn is installed but broken: undefined symbol: x"
    )


@pytest.mark.parametrize("name", ["cudnn", "flash_attn"])
def test_each_is_chosen_only_on_gpus_that_have_its_kernels(name: str) -> None:
    asked = {"half": True, "deterministic": False, "documents": False}
    found = [backend_conflict(name, "cuda", **asked, capability=c) for c in CAPABILITIES]
    assert found == [f"{name} needs compute capability 8.0 or newer, not 7.5", None, None, None]


def test_cudnn_is_refused_where_bits_are_compared_before_anything_starts() -> None:
    request = Request(preset="production", overrides=("model.attention_backend=cudnn",))
    with pytest.raises(ConfigError, match=r"deterministic \(system\.deterministic=false allows it"):
        load(request, lambda: True)


def test_a_backend_of_gpus_is_refused_on_a_cpu_before_anything_starts() -> None:
    request = Request(preset="cpu", overrides=("model.attention_backend=cudnn",))
    expected = r"model\.attention_backend = 'cudnn': cudnn needs a CUDA GPU, not cpu"
    with pytest.raises(ConfigError, match=expected):
        load(request, lambda: False)
    with pytest.raises(ConfigError, match=expected):
        candidates_for("cudnn", needs(CPU))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_named_backend_is_taken(name: str) -> None:
    assert candidates_for(name, needs(CPU))[0] == [name]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.attention_backend=flash_attn_2", "it is named flash_attn"),
        ("model.attention_backend=flash_attn_3", "FlashAttention 3 and 4 are not offered"),
        ("model.attention_backend=flash_attn_4", "set model.attention_backend=auto, which"),
        ("model.attn_implementation=flash_attention_3", "3 and 4 are not offered"),
    ],
)
def test_generations_that_are_not_offered_say_what_to_take(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(Request(preset="production", overrides=(setting,)), lambda: True)


def test_the_checkpoint_of_a_run_with_one_of_them_is_known_all_the_same() -> None:
    saved = msgspec.to_builtins(Settings())
    saved["model"]["attention_backend"] = "flash_attn_3"
    assert known_settings(saved).model.attention_backend == "auto"


DOCUMENTED = {
    "model": {"num_layers": 8, "attention_backend": "flash_attn"},
    "training": {"batch_size": 4, "max_steps": 500, "context_length": 4096},
    "system": {"device": "cuda", "seed": 42},
}


def documented(tmp_path: Path, *overrides: str) -> Settings:
    file = tmp_path / "custom_config.json"
    file.write_text(json.dumps(DOCUMENTED))
    return load(Request(config_file=file, overrides=overrides), lambda: True).settings


def test_the_documented_file_trains_where_no_flash_attention_is_installed(
    tmp_path: Path, no_package: None
) -> None:
    expected = (["sdpa", "eager"], f"instead of flash_attn: {MISSING}")
    assert candidates_for("flash_attn", needs()) == expected


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("device=cpu", "flash_attn needs a CUDA GPU, not cpu"),
        ("use_amp=false", "flash_attn needs bfloat16 or float16, not float32"),
        ("document_masking=true", "flash_attn takes no mask"),
    ],
)
def test_the_launcher_says_why_flash_attention_falls_back_without_its_import(
    tmp_path: Path, package: Path, override: str, why: str
) -> None:
    settings = documented(tmp_path, override)
    assert str(flash_fallback(settings, settings.system.device)).startswith(why)
    assert flash_fallback(documented(tmp_path), "cuda") is None
    assert "flash_attn" not in sys.modules, "it would bring torch to the launcher"
    package.unlink()
    package.parent.rmdir()
    assert flash_fallback(documented(tmp_path), "cuda") == MISSING


def test_disabling_flash_attention_means_sdpa_on_every_entry_point() -> None:
    from launcher.arguments import parse_run
    from model_check.config.arguments import settings_request
    from pretrain_main import parser

    by_launcher = parse_run(["--disable-flash-attn"], {}).request
    by_worker = settings_request(parser().read(["--disable_flash_attn"]), {})
    for request in (by_launcher, by_worker):
        got = load(request, lambda: False)
        assert got.settings.model.attention_backend == "sdpa"
        assert got.sources["model.attention_backend"] == "--disable-flash-attn"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "cudnn", "flash_attn"])
def test_kernels_of_the_gpu_equal_eager_within_their_precision(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)]
    q, k, v = (torch.randn(s, generator=generator).bfloat16().cuda() for s in shapes)
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
    exact = eager(q.double(), k.double(), v.double())
    assert (backend(name)(q, k, v, None).double() - exact).abs().max() <= 0.03
