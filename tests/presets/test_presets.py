"""Presets are data: known keys, promised values, and each loads with and without a GPU."""

import pytest

from launcher.gpus.sizes import FULL_GIB, PRODUCTION, SISTERS
from model_check.config.derived import attention_span
from model_check.config.files import read_settings_file
from model_check.config.load import PRESETS_DIR, Loaded, Request, load, preset_names
from model_check.config.memory import estimate_memory
from model_check.config.shape import geometry
from model_check.hooks.observe.gates import REACH, gate_reach


def loaded(preset: str, *, gpu: bool) -> Loaded:
    return load(Request(preset=preset), lambda: gpu)


def test_the_directory_holds_presets_and_nothing_else() -> None:
    assert {path.suffix for path in PRESETS_DIR.iterdir()} == {".json"}
    assert preset_names() == [
        "cpu",
        "debug",
        "finetune",
        "infini-tiny",
        "pretrain",
        "production",
        "production-medium",
        "production-small",
        "train",
    ]


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("gpu", [True, False])
def test_every_preset_loads_and_is_seen_in_the_sources(preset: str, gpu: bool) -> None:
    got = loaded(preset, gpu=gpu)
    named = set(read_settings_file(PRESETS_DIR / f"{preset}.json")) - {"on_cpu"}
    assert {n.partition(".")[0] for n, s in got.sources.items() if s == f"preset {preset}"} == named


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_says_nothing_of_how_the_supervisor_runs(preset: str) -> None:
    values = read_settings_file(PRESETS_DIR / f"{preset}.json")
    assert set(values) <= {"model", "training", "data", "system", "logging", "debug", "on_cpu"}


def test_debug_is_what_the_guide_says() -> None:
    settings = loaded("debug", gpu=True).settings
    training = settings.training
    assert (settings.model.num_layers, training.max_steps, training.context_length) == (2, 10, 512)
    assert (training.learning_rate, training.use_amp) == (1e-7, False)
    assert settings.debug.dump_tensors
    assert settings.model.hidden_size == 4096


def test_debug_on_a_cpu_is_narrow() -> None:
    model = loaded("debug", gpu=False).settings.model
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (2, 128, None)


def test_pretraining_pays_for_adamw_once_in_64k_tokens_and_fits_an_80_gib_gpu() -> None:
    """28 bytes a parameter: 16 ms of an H100's memory, beside 8 x 130 ms of products."""
    settings = loaded("pretrain", gpu=True).settings
    training = settings.training
    assert training.batch_size * training.grad_accum_nums * training.context_length >= 65_536
    assert training.compile
    assert not settings.system.deterministic
    assert settings.model.num_layers == loaded("production", gpu=True).settings.model.num_layers
    estimate = estimate_memory(settings, "cuda")
    assert estimate.total < 0.81 * 79 * 2**30, estimate.describe()
    assert not loaded("pretrain", gpu=False).settings.training.compile


def test_production_is_the_default_workload() -> None:
    settings = loaded("production", gpu=True).settings
    training = settings.training
    assert (training.max_steps, training.context_length, training.learning_rate) == (
        100,
        8192,
        1e-5,
    )
    assert geometry(settings.model, 128256).num_parameters == 1_923_125_248
    assert training.warmup_steps == 0  # the sample line shows the preset's rate at step 0


@pytest.mark.parametrize(
    ("preset", "total_gib"),
    [(PRODUCTION, FULL_GIB), *SISTERS[:-1], (SISTERS[-1][0], 4.75)],  # a MIG slice 1g.5gb
)
def test_each_size_fits_the_smallest_gpu_that_it_is_for(preset: str, total_gib: float) -> None:
    estimate = estimate_memory(loaded(preset, gpu=True).settings, "cuda")
    assert estimate.total < 0.81 * total_gib * 2**30, estimate.describe()


def test_infini_tiny_has_sixteen_segments_and_gates_that_can_open() -> None:
    settings = loaded("infini-tiny", gpu=False).settings
    assert settings.model.attention == "infini"
    assert settings.training.context_length == 16 * attention_span(settings)
    assert gate_reach(settings) >= REACH
    full = load(Request("infini-tiny", overrides=("model.attention=full",)), lambda: False)
    assert full.notes == ()


def test_cpu_is_small_enough_for_any_machine() -> None:
    settings = loaded("cpu", gpu=False).settings
    assert geometry(settings.model, 8192).state_bytes < 2**28
