"""The choice of an attention backend: what it says, and what a FlashAttention package is given."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launcher.doctor.preflight import check_training
from model_check.config.backends import flash_fallback, generation_obstacle
from model_check.config.load import Request, load
from model_check.config.schema import Settings
from model_check.errors import ConfigError
from model_check.models.attention import FLASH_MODULES, bound, eager
from model_check.models.backends import (
    KernelNeeds,
    _best,
    _newest_flash,
    _obstacle,
    candidates_for,
    needs_of,
)
from pretrain_main import refuse_impossible

CUDA = torch.device("cuda")
TURING, AMPERE, HOPPER, BLACKWELL = (7, 5), (8, 0), (9, 0), (10, 0)

PACKAGE = """
import torch

calls = []

def flash_attn_func(q, k, v, softmax_scale=None, causal=False{extra}):
    calls.append({{"shape": tuple(q.shape), "causal": causal, **{seen}}})
    from model_check.models.attention import eager
    out = eager(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    return {result}
"""
"""A FlashAttention that computes with our definition: what matters is how it is called."""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        del sys.modules[module]


def write(path: Path, *, deterministic: bool, result: str = "out") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    extra, seen = (", deterministic=False", "{'deterministic': deterministic}")
    text = PACKAGE.format(
        extra=extra if deterministic else "", seen=seen if deterministic else "{}", result=result
    )
    path.write_text(text)


@pytest.fixture
def every_flash_attention(packages: Path) -> Path:
    """All three generations, each with a parameter `deterministic`."""
    for file in ("flash_attn/__init__.py", "flash_attn/cute/__init__.py"):
        write(packages / file, deterministic=True)
    write(packages / "flash_attn_interface.py", deterministic=True)
    return packages


@pytest.mark.parametrize(
    ("name", "file", "deterministic", "result"),
    [
        ("flash_attn_2", "flash_attn/__init__.py", True, "out"),
        ("flash_attn_3", "flash_attn_interface.py", True, "out"),
        ("flash_attn_3", "flash_attn_interface.py", True, "(out, None)"),
        ("flash_attn_4", "flash_attn/cute/__init__.py", False, "(out, None)"),
    ],
)
def test_every_generation_is_called_in_its_own_way(
    packages: Path, name: str, file: str, deterministic: bool, result: str
) -> None:
    (packages / "flash_attn").mkdir()
    (packages / "flash_attn" / "__init__.py").touch()
    write(packages / file, deterministic=deterministic, result=result)
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    assert torch.equal(bound(name, deterministic=True)(q, k, v, None), eager(q, k, v))
    call = sys.modules[FLASH_MODULES[name]].calls[-1]
    expected = {"shape": (2, 8, 4, 16), "causal": True}
    assert call == (expected | {"deterministic": True} if deterministic else expected)


def test_a_package_that_cannot_be_deterministic_is_refused_where_bits_count(
    packages: Path,
) -> None:
    write(packages / "flash_attn" / "__init__.py", deterministic=False)
    wanted = KernelNeeds(CUDA, torch.bfloat16, deterministic=True, documents=False)
    assert "system.deterministic=false" in str(_obstacle("flash_attn_2", wanted))


class OnHopper(KernelNeeds):
    """What is wanted of an H100, wherever the test runs."""

    capability = HOPPER


def test_where_bits_are_compared_a_trial_decides_on_flash_attention_3_and_4(
    every_flash_attention: Path,
) -> None:
    for deterministic in (False, True):
        needs = OnHopper(CUDA, torch.bfloat16, deterministic=deterministic, documents=False)
        flash = ["flash_attn_4", "flash_attn_3", "flash_attn_2"]
        assert _newest_flash(needs)[0] == _best(needs)[0] == flash
        assert candidates_for("auto", needs)[0] == [*flash, "sdpa", "eager"]


@pytest.mark.parametrize("documents", [False, True])
def test_float32_and_documents_leave_kernels_of_torch_alone(
    every_flash_attention: Path, documents: bool
) -> None:
    dtype = torch.bfloat16 if documents else torch.float32
    needs = OnHopper(CUDA, dtype, deterministic=True, documents=documents)
    assert candidates_for("auto", needs)[0] == ["sdpa", "eager"]


def test_a_broken_package_is_no_missing_one(packages: Path) -> None:
    (packages / "flash_attn").mkdir()
    (packages / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol: x')")
    with pytest.raises(ConfigError, match="installed but broken: undefined symbol: x"):
        candidates_for("flash_attn_2", needs_of(CUDA, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "runs_on"),
    [
        ("cudnn", {AMPERE, HOPPER, BLACKWELL}),
        ("flash_attn_2", {AMPERE, HOPPER, BLACKWELL}),
        ("flash_attn_3", {HOPPER}),
        ("flash_attn_4", {HOPPER, BLACKWELL}),
    ],
)
def test_each_is_chosen_only_on_gpus_that_have_its_kernels(
    name: str, runs_on: set[tuple[int, int]]
) -> None:
    every = {TURING, AMPERE, HOPPER, BLACKWELL}
    assert {c for c in every if generation_obstacle(name, c) is None} == runs_on
    assert "7.5" in str(generation_obstacle(name, TURING))


def test_cudnn_is_refused_where_bits_are_compared_before_anything_starts() -> None:
    request = Request(preset="production", overrides=("model.attention_backend=cudnn",))
    with pytest.raises(ConfigError, match=r"deterministic \(system\.deterministic=false allows it"):
        load(request, lambda: True)


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "cudnn"])
def test_a_backend_of_gpus_is_refused_on_a_cpu_before_anything_starts(name: str) -> None:
    request = Request(preset="cpu", overrides=(f"model.attention_backend={name}",))
    expected = rf"model\.attention_backend = '{name}': {name} needs a CUDA GPU, not cpu"
    with pytest.raises(ConfigError, match=expected):
        load(request, lambda: False)


def test_flash_attention_takes_no_documents() -> None:
    overrides = ("model.attention_backend=flash_attn_2", "data.document_masking=true")
    with pytest.raises(ConfigError, match=r"data\.document_masking=true.*sdpa and eager do"):
        load(Request(preset="production", overrides=overrides), lambda: True)
    needs = needs_of(CUDA, torch.bfloat16, documents=True)
    assert candidates_for("auto", needs)[0] == ["sdpa", "eager"]


DOCUMENTED = {
    "model": {"num_layers": 8, "attention_backend": "flash_attn"},
    "training": {"batch_size": 4, "max_steps": 500, "context_length": 4096},
    "system": {"device": "cuda", "seed": 42},
}


def documented(tmp_path: Path, *overrides: str) -> Settings:
    file = tmp_path / "custom_config.json"
    file.write_text(json.dumps(DOCUMENTED))
    return load(Request(config_file=file, overrides=overrides), lambda: True).settings


def test_the_documented_file_trains_where_no_flash_attention_is_installed(tmp_path: Path) -> None:
    settings = documented(tmp_path)
    missing = "flash_attn_2 is not installed (pip install flash-attn --no-build-isolation)"
    assert flash_fallback(settings, "cuda") == missing
    needs = OnHopper(CUDA, torch.bfloat16, deterministic=True, documents=False)
    assert _newest_flash(needs) == (["sdpa"], f"instead of flash_attn: {missing}")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("device=cpu", "flash_attn needs a CUDA GPU, not cpu"),
        ("use_amp=false", "flash_attn needs bfloat16 or float16, not float32"),
        ("document_masking=true", "flash_attn takes no mask"),
    ],
)
def test_what_flash_attention_cannot_do_falls_back_too(
    tmp_path: Path, every_flash_attention: Path, override: str, why: str
) -> None:
    settings = documented(tmp_path, override)
    assert str(flash_fallback(settings, settings.system.device)).startswith(why)
    assert flash_fallback(documented(tmp_path), "cuda") is None


def test_the_launcher_knows_a_flash_attention_without_its_import(
    tmp_path: Path, packages: Path
) -> None:
    write(packages / "flash_attn_interface.py", deterministic=True)
    assert flash_fallback(documented(tmp_path), "cuda") is None
    assert flash_fallback(documented(tmp_path, "deterministic=false"), "cuda") is None
    assert "flash_attn_interface" not in sys.modules, "it would bring torch to the launcher"


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
def test_a_generation_by_name_is_refused_before_data_is_prepared(
    tmp_path: Path, packages: Path, name: str
) -> None:
    (packages / "flash_attn").mkdir()
    overrides = (f"attention_backend={name}", "deterministic=false")
    settings = documented(tmp_path, *overrides)
    if name == "flash_attn_2":
        (packages / "flash_attn").rmdir()
    for refuse in (
        lambda: check_training(settings, []),
        lambda: refuse_impossible(settings, "cuda"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is not installed"):
            refuse()


def test_float32_leaves_only_sdpa_to_auto() -> None:
    names, reason = candidates_for("auto", needs_of(CUDA, torch.float32))
    assert names == ["sdpa", "eager"]
    assert "use_amp=true" in reason


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
@pytest.mark.parametrize("name", ["sdpa", "cudnn"])
def test_kernels_of_the_gpu_equal_eager_within_their_precision(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)]
    q, k, v = (torch.randn(s, generator=generator).bfloat16().cuda() for s in shapes)
    exact = eager(q.double(), k.double(), v.double())
    assert (bound(name)(q, k, v, None).double() - exact).abs().max() <= 0.03
