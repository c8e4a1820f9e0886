"""model.geometry: a size, a directory or a hub id. A key that a person gives overrides it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from model_check.config.geometry import SIZES, geometry_values, read_config
from model_check.config.load import Loaded, Request, load, to_json
from model_check.config.resume import architecture_changes
from model_check.config.shape import geometry
from model_check.errors import ConfigError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 700,
    "rms_norm_eps": 1e-6,
    "rope_theta": 12345.0,
    "tie_word_embeddings": True,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}


def loaded(*overrides: str, preset: str | None = None) -> Loaded:
    return load(Request(preset=preset, overrides=overrides), lambda: False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_scaling": SCALING}))
    return tmp_path


@pytest.mark.parametrize(
    ("size", "num_parameters"),
    [
        ("tiny", 21_204_224),
        ("small", 134_105_856),
        ("medium", 343_983_104),
        ("large", 721_233_408),
        ("xl", 1_548_879_872),
    ],
)
def test_a_size_has_the_parameters_that_are_told(size: str, num_parameters: int) -> None:
    settings = loaded(f"model.geometry={size}").settings
    assert geometry(settings.model, 32000).num_parameters == num_parameters


def test_a_size_stands_over_the_preset_and_under_a_key(directory: Path) -> None:
    got = loaded("model.geometry=large", "model.num_layers=3", preset="debug")
    assert (got.settings.model.num_layers, got.settings.model.hidden_size) == (3, 1536)
    assert got.sources["model.hidden_size"] == "geometry large"
    assert got.sources["model.num_layers"] == "model.num_layers=3"


@pytest.mark.parametrize("preset", ["production", "cpu", "debug", "train"])
def test_a_width_and_heads_alone_give_the_sizes_of_the_documents(preset: str) -> None:
    for size, parts in SIZES.items():
        keys = ["num_layers", "hidden_size", "num_heads"]
        if parts["num_kv_heads"] != parts["num_heads"]:
            keys.append("num_kv_heads")
        given = loaded(*(f"{key}={parts[key]}" for key in keys), preset=preset).settings
        named = loaded(f"model.geometry={size}").settings
        assert geometry(given.model, 1) == replace(
            geometry(named.model, 1), vocab_size=given.model.vocab_size or 1
        )


def test_what_follows_a_width_says_so_and_yields_to_a_key(tmp_path: Path) -> None:
    got = loaded("hidden_size=512", preset="debug")
    assert got.settings.model.intermediate_size is None
    assert got.sources["model.intermediate_size"] == "follows model.hidden_size"
    assert got.settings.model.num_kv_heads == 2, "no heads were given"
    model = loaded("hidden_size=512", "intermediate_size=100", "num_heads=8", "num_kv_heads=2")
    shape = geometry(model.settings.model, 1)
    assert (shape.intermediate_size, shape.num_kv_heads) == (100, 2)
    both = loaded("intermediate_size=null", "num_kv_heads=null").settings.model
    assert (geometry(both, 1).intermediate_size, geometry(both, 1).num_kv_heads) == (704, 8)
    resolved = tmp_path / "resolved.json"
    resolved.write_bytes(to_json(both_settings := loaded("hidden_size=512").settings))
    after = load(Request(config_file=resolved), lambda: False).settings
    assert after.model == both_settings.model


def test_a_derived_width_is_the_same_model_to_a_checkpoint() -> None:
    derived = loaded("model.geometry=small", "hidden_size=768", "num_heads=12").settings
    named = loaded("model.geometry=small").settings
    assert derived.model != named.model
    assert architecture_changes(msgspec.to_builtins(derived), named) == []
    wider = loaded("model.geometry=small", "intermediate_size=2112").settings
    assert architecture_changes(msgspec.to_builtins(derived), wider) == [
        "model.intermediate_size 2048 -> 2112"
    ]


def test_a_directory_gives_its_config(directory: Path) -> None:
    model = loaded(f"model.geometry={directory}").settings.model
    assert (model.num_layers, model.num_kv_heads, model.vocab_size) == (3, 2, 700)
    assert (model.rope_theta, model.tie_word_embeddings) == (12345.0, True)
    assert model.rope_scaling is not None
    assert model.rope_scaling.original_context_length == 64
    assert model.model_path == str(directory)


def test_the_rotary_keys_of_transformers_5_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    file.write_text(json.dumps(config | {"rope_parameters": SCALING | {"rope_theta": 777.0}}))
    values = read_config(file)
    assert (values["rope_theta"], values["rope_scaling"]["factor"]) == (777.0, 4.0)


def test_resolved_settings_need_the_directory_no_more(directory: Path, tmp_path: Path) -> None:
    before = loaded(f"model.geometry={directory}").settings
    resolved = tmp_path / "resolved.json"
    resolved.write_bytes(to_json(before))
    (directory / "config.json").unlink()
    after = load(Request(config_file=resolved), lambda: False).settings
    assert after.model == before.model


def test_a_hub_id_is_fetched_through_the_seam(directory: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def fetch(repo: str, offline: bool) -> Path:
        asked.append((repo, offline))
        return directory / "config.json"

    values = geometry_values("org/model", offline=True, fetch=fetch)
    assert asked == [("org/model", True)]
    assert (values["hidden_size"], values["model_path"]) == (96, "org/model")


def test_a_hub_id_that_cannot_be_had_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server answers there
    with pytest.raises(ConfigError, match=r"^model\.geometry: org/nowhere: its config") as caught:
        loaded("model.geometry=org/nowhere")
    assert "\n" not in str(caught.value)


def test_neither_size_nor_directory_nor_hub_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="no size \\(tiny, small, medium, large, xl\\)"):
        loaded("model.geometry=smal")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config: quantized weights"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ({"hidden_size": "wide"}, "model.hidden_size = 'wide'"),
    ],
)
def test_what_is_no_llama_of_ours_is_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ConfigError, match=expected):
        loaded(f"model.geometry={tmp_path}")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000])
def test_a_config_that_no_reader_takes_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="not the config"):
        loaded(f"model.geometry={tmp_path}")


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="has no 'num_hidden_layers'"):
        loaded(f"model.geometry={tmp_path}")


def test_all_sizes_name_the_same_keys() -> None:
    assert len({frozenset(size) for size in SIZES.values()}) == 1
