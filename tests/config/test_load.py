"""The sources of settings, their order, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_check.config.derived import failing_severities
from model_check.config.fields import PATHS, all_fields
from model_check.config.load import Loaded, Request, load, to_json
from model_check.errors import ConfigError


def resolve(*overrides: str, gpu: bool = False, **request: object) -> Loaded:
    return load(Request(overrides=overrides, **request), has_gpu=lambda: gpu)  # type: ignore[arg-type]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


SEED_CUSTOM = """{
  "model": {
    "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    "num_layers": 8,
    "attention_backend": "flash_attn"
  },
  "training": {
    "batch_size": 4,
    "learning_rate": 5e-6,
    "max_steps": 500,
    "context_length": 4096
  },
  "system": {
    "device": "cuda",
    "seed": 42
  }
}"""

SEED_SINGLE_GPU = """{
    "training": {
        "batch_size": 8,         // Larger batch since only one GPU
        "grad_accum_nums": 4,    // Less accumulation needed
        "num_workers": 8         // More data workers for single GPU
    }
}"""


def test_the_documented_custom_file_loads_as_it_is_printed(tmp_path: Path) -> None:
    loaded = resolve(config_file=written(tmp_path / "my.json", SEED_CUSTOM))
    assert (loaded.preset, loaded.device) == ("production", "cuda")
    assert loaded.settings.model.num_layers == 8
    assert loaded.settings.training.learning_rate == 5e-6
    assert loaded.sources["training.max_steps"].endswith("my.json")


def test_the_documented_file_with_comments_loads_as_it_is_printed(tmp_path: Path) -> None:
    training = resolve(
        config_file=written(tmp_path / "single.json", SEED_SINGLE_GPU)
    ).settings.training
    assert (training.batch_size, training.grad_accum_nums, training.num_workers) == (8, 4, 8)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "training:\n  learning_rate: 1e-4\n  max_steps: 7\n"),
        ("a.yml", "training: {learning_rate: 0.0001, max_steps: 7}"),
        ("a.toml", "[training]\nlearning_rate = 1e-4\nmax_steps = 7\n"),
        ("a.json", '{"training": {"learning_rate": 1e-4, "max_steps": 7,},} // the end'),
    ],
)
def test_every_file_format_gives_the_same_settings(tmp_path: Path, name: str, text: str) -> None:
    training = resolve(config_file=written(tmp_path / name, text)).settings.training
    assert (training.learning_rate, training.max_steps) == (1e-4, 7)


def test_each_source_is_laid_over_the_ones_before_it(tmp_path: Path) -> None:
    file = written(tmp_path / "f.json", '{"training": {"max_steps": 2, "batch_size": 3}}')
    loaded = resolve(
        "training.batch_size=4",
        preset="debug",
        config_file=file,
        environ={"DATASET_CACHE_DIR": "/elsewhere"},
        flags={"training.max_steps": ("--max-steps", "9")},
    )
    training = loaded.settings.training
    assert (training.max_steps, training.batch_size, training.context_length) == (9, 4, 512)
    assert loaded.settings.data.cache_dir == "/elsewhere"
    assert loaded.sources["training.max_steps"] == "--max-steps"
    assert loaded.sources["training.batch_size"] == "training.batch_size=4"
    assert loaded.sources["training.context_length"] == "preset debug"
    assert loaded.sources["data.cache_dir"] == "DATASET_CACHE_DIR"
    assert loaded.sources["training.weight_decay"] == "default"


def test_an_empty_text_is_a_value_where_it_means_none(tmp_path: Path) -> None:
    name = "MODEL_CHECK_HISTORY_FILE"
    assert resolve().settings.launch.history_file is None
    assert resolve("launch.history_file=").settings.launch.history_file == ""
    assert resolve(environ={name: ""}).settings.launch.history_file == ""
    assert resolve(environ={name: "null"}).settings.launch.history_file is None
    assert resolve("launch.history_file=h", environ={name: ""}).settings.launch.history_file == "h"
    file = written(tmp_path / "again.json", to_json(resolve(environ={name: ""}).settings).decode())
    assert resolve(config_file=file).settings.launch.history_file == ""
    assert resolve(environ={"DATASET_CACHE_DIR": ""}).sources["data.cache_dir"] == "default"


@pytest.mark.parametrize(("gpu", "preset"), [(True, "production"), (False, "cpu")])
def test_without_a_preset_the_device_chooses_one(gpu: bool, preset: str) -> None:
    assert resolve(gpu=gpu).preset == preset


def test_debug_on_a_cpu_keeps_its_steps_and_length_with_a_geometry_that_fits() -> None:
    on_gpu, on_cpu = (resolve(preset="debug", gpu=gpu) for gpu in (True, False))
    for settings in (on_gpu.settings, on_cpu.settings):
        assert (settings.model.num_layers, settings.training.max_steps) == (2, 10)
        assert (settings.training.context_length, settings.training.learning_rate) == (512, 1e-7)
    assert on_gpu.settings.model.hidden_size == 4096
    assert on_cpu.settings.model.hidden_size == 128
    assert on_cpu.sources["model.hidden_size"] == "preset debug (on_cpu)"


def test_presets_are_the_documented_ones() -> None:
    production = resolve(preset="production").settings
    assert (production.model.num_layers, production.training.max_steps) == (4, 100)
    assert (production.training.context_length, production.training.learning_rate) == (8192, 1e-5)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("optimizer.gradient_accumulation_steps=8", "global_grad_accum_nums", 8),
        ("lr.warmup_iters=5", "warmup_steps", 5),
        ("training.max_iters=12", "max_steps", 12),
        ("data.context_size=64", "context_length", 64),
        ("training.grad_clip=null", "max_grad_norm", None),
        ("training.mixed_precision=false", "precision", "fp32"),
    ],
)
def test_names_of_the_other_documents_are_understood(
    override: str, field: str, value: object
) -> None:
    assert getattr(resolve(override).settings.training, field) == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("training.max_step=5",), "did you mean training.max_steps"),
        (("trainig.max_steps=5",), "did you mean training.max_steps"),
        (("training.max_steps=null",), "training.max_steps = 'null': expected int"),
        (("training.max_steps=0",), "expected int >= 1"),
        (("training.max_steps=1.5",), "expected int"),
        (("training.learning_rate=nan",), "training.learning_rate"),
        (("training.learning_rate=inf",), "must be a finite number"),
        (("training.use_amp=maybe",), "expected true or false"),
        (("data.dataset=",), "data.dataset is empty"),
        (("model.num_heads=7",), "model.num_heads = 7 must divide hidden_size = 256"),
        (("system.device=tpu",), 'expected "auto" or "cuda" or "cpu"'),
        (("foo",), "not section.key=value"),
        (("training=5",), "training is a section"),
        (("model.rope_scaling=5",), "is a section"),
        (("model.num_kv_heads=3",), "must divide num_heads"),
        (("training.warmup_steps=31",), "more than max_steps"),
        (("training.min_lr=1",), "above learning_rate"),
        (("training.global_batch_size=3",), "not a multiple of batch_size"),
        (("training.global_batch_size=4", "training.grad_accum_nums=4"), "give one of the two"),
        (("data.hf_token=hf_abc",), "export HF_TOKEN"),
        (("training.max_steps=\udcff",), "training.max_steps = '\\udcff': expected int >= 1"),
        (("data.dataset=\udcff",), "data.dataset = '\\udcff': not valid UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_where_and_what(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"training": {"max_steps": null}}', "training.max_steps"),
        ("a.json", '{"training": {"max_steps": "7"}}', "expected int, got str"),
        ("a.json", '{"training": {"max_steps": true}}', "expected int, got bool"),
        ("a.json", '{"training": {"max_steps": 1, "max_iters": 1}}', "are the same setting"),
        ("a.json", '{"training": {"max_steps": 1, "max_steps": 2}}', "given twice"),
        ("a.yaml", "training:\n  max_steps: 1\n  max_steps: 2\n", "'max_steps' is given twice"),
        ("a.json", "[1, 2]", "must be an object"),
        ("a.json", '{"training": ', "not JSON"),
        ("a.yaml", "training: [", "not YAML"),
        ("a.yaml", "training: &x\n  y: *x", "within itself"),
        ("a.json", "[" * 100000, "nested too deeply"),
        ("a.toml", "training = [", "not TOML"),
        ("a.json", '{"modle": {"num_layers": 2}}', "did you mean model.num_layers"),
        ("a.json", '{"training": 5}', "training is a section"),
        ("a.json", '{"modle": {}}', "modle: no such setting"),
        ("a.json", '{"training": {"max_steps": {}}}', "expected int"),
        ("a.json", '{"schema": 2}', "written by another version"),
        ("debug.json", '{"on_cpu": {}}', "on_cpu: only a preset has it: --preset debug, or leave"),
        ("a.json", '{"on_cpu": {}}', "on_cpu: only a preset has it: leave it out"),
        ("a.ini", "[training]", "is no settings file"),
        ("a.json", '{"a": 1, // c\n "b" 2}', "not JSON: line 2"),
        ("a.json", '{"training": {"max_steps": 1, "max_steps": 2,}}', "_steps' is given twice"),
        ("a.json", '{"training": {"max_steps": %s}}' % ("1" * 5000), "for integer string"),
        ("a.json", '{"training": {"max_steps": "\\udcff"}}', "expected int >= 1"),
        ("a.json", '{"launch": {"fail_on": ["\\udcff"]}}', "expected list of"),
        ("a.yaml", "training: {max_steps: 2020-99-99}", "expected int >= 1"),
        ("a.yaml", "training: {max_steps: 1:30}", "max_steps = '1:30': expected int"),
        ("a.yaml", "training: {max_steps: yes}", "max_steps = 'yes': expected int"),
        ("a.yaml", "logging: {wandb: no}", "expected"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config_file=written(tmp_path / name, text))
    assert str(tmp_path / name) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "line", "value"),
    [
        ("logging", "wandb: off", "off"),
        ("logging", "details: on", True),
        ("logging", "details: No", False),
        ("logging", "details: TRUE", True),
        ("training", "compile: yes", True),
        ("training", "max_steps: 010", 10),
        ("training", "max_steps: 0o10", 8),
        ("training", "max_steps: 0x10", 16),
        ("training", "max_steps: 1_000", 1000),
        ("training", "learning_rate: 1e-4", 1e-4),
        ("training", "learning_rate: 1.5E-3", 1.5e-3),
        ("training", "learning_rate: .5", 0.5),
        ("training", "resume: ~", None),
        ("data", "dataset: 2020-01-01", "2020-01-01"),
        ("data", "dataset: 1:30", "1:30"),
        ("data", "dataset: no", "no"),
        ("data", "dataset: 'on'", "on"),
    ],
)
def test_yaml_means_what_a_person_meant(
    tmp_path: Path, section: str, line: str, value: object
) -> None:
    """PyYAML knows YAML 1.1 alone."""
    file = written(tmp_path / "a.yaml", f"{section}:\n  {line}\n")
    found = getattr(getattr(resolve(config_file=file).settings, section), line.partition(":")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("content", ["utf-8-sig", "utf-16", "utf-16-le with a mark"])
def test_a_file_of_another_editor_is_read(tmp_path: Path, content: str) -> None:
    text = '{"training": {"max_steps": 7}}'
    raw = b"\xff\xfe" + text.encode("utf-16-le") if " " in content else text.encode(content)
    (tmp_path / "a.json").write_bytes(raw)
    assert resolve(config_file=tmp_path / "a.json").settings.training.max_steps == 7


def test_a_missing_file_and_a_missing_preset_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such settings file"):
        resolve(config_file=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="did you mean debug"):
        resolve(preset="debgu")


def test_rope_scaling_can_be_switched_off_and_on_again() -> None:
    assert resolve("model.rope_scaling=null").settings.model.rope_scaling is None
    again = resolve("model.rope_scaling=null", "model.rope_scaling.factor=4").settings.model
    assert again.rope_scaling is not None
    assert (again.rope_scaling.factor, again.rope_scaling.high_freq_factor) == (4, 4)


def test_a_setting_of_a_section_that_is_switched_off_has_no_value() -> None:
    """A comparison of arms asks each of them for each setting."""
    loaded = resolve("model.rope_scaling=null")
    assert {n for n in all_fields() if "rope_scaling" in n and loaded.value(n) is not None} == set()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.rope_scaling=null",),
        ("training.global_batch_size=8", "training.batch_size=2"),
        ("data.validation=null",),  # beside an interval that only the preset asks for
    ],
)
def test_the_resolved_file_alone_gives_the_same_training(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    first = resolve(*overrides, preset="train").settings
    path = tmp_path / "config.json"
    path.write_bytes(to_json(first))
    assert to_json(resolve(config_file=path).settings) == to_json(first)
    json.loads(path.read_text())


def test_a_callback_for_the_gpu_is_not_asked_when_the_device_is_given() -> None:
    def explode() -> bool:
        raise AssertionError("asked for a GPU")

    assert load(Request(overrides=("system.device=cpu",)), explode).device == "cpu"


@pytest.mark.parametrize("word", ["1", "YES", "on", "True"])
def test_the_hubs_own_words_for_offline_are_understood(word: str) -> None:
    assert resolve(environ={"HF_HUB_OFFLINE": word}).settings.data.offline
    assert not resolve(environ={"HF_HUB_OFFLINE": "0"}).settings.data.offline


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("launch.fail_on=isolate", ("isolate",)),
        ("launch.fail_on=isolate, monitor", ("isolate", "monitor")),
        ("launch.fail_on=[reset]", ("reset",)),
        ("launch.fail_on=[\"reset\", 'speed']", ("reset", "speed")),
        ("launch.fail_on=[]", ()),
        ("launch.fail_on=[ ]", ()),
    ],
)
def test_a_list_is_written_with_commas_on_the_command_line(
    text: str, value: tuple[str, ...]
) -> None:
    assert resolve(text).settings.launch.fail_on == value


@pytest.mark.parametrize("text", ["", "isolat", "isolate,", "null", "1", "isolate;reset"])
def test_a_list_of_anything_else_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.fail_on = '{text}': expected list of \"isolate"):
        resolve(f"launch.fail_on={text}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"launch": {"fail_on": ["reset", "monitor"]}}'),
        ("a.yaml", "launch: {fail_on: [reset, monitor]}"),
        ("b.yaml", "launch:\n  fail_on: reset, monitor"),
        ("a.toml", '[launch]\nfail_on = ["reset", "monitor"]'),
    ],
)
def test_a_list_comes_from_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    loaded = resolve(config_file=written(tmp_path / name, text))
    assert loaded.settings.launch.fail_on == ("reset", "monitor")


def test_the_older_name_of_all_that_fails_a_run_survives_a_round_trip(tmp_path: Path) -> None:
    loaded = resolve("launch.fail_on_health=true")
    assert failing_severities(loaded.settings.launch) == ("isolate", "reset", "monitor", "speed")
    path = tmp_path / "config.json"
    path.write_bytes(to_json(loaded.settings))
    again = resolve(config_file=path)
    assert again.settings.launch.fail_on == ("isolate", "reset", "monitor", "speed")
    with pytest.raises(ConfigError, match="give one of the two"):
        resolve("launch.fail_on=isolate", config_file=path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.stride=65", "training.context_length=64"), "data.stride = 65 is more than"),
        (("model.attention_backend=cudnn",), "model.attention_backend = 'cudnn': "),
        (("data.validation=v=nope.txt",), "data.validation: v = nope.txt: no such"),
    ],
)
def test_a_message_says_a_setting_once(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("system.device=cpu", *overrides)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_home_is_a_home_in_every_setting_that_is_a_path(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shell leaves `~` alone behind a `=`."""
    monkeypatch.setenv("HOME", "/home/me")
    section, _, key = name.partition(".")
    file = written(tmp_path / "a.json", json.dumps({section: {key: "~/x y"}}))

    def taken(*overrides: str, **more: Any) -> str:
        try:
            return str(getattr(getattr(resolve(*overrides, **more).settings, section), key))
        except ConfigError as error:  # it must be there
            return str(error)

    assert "/home/me/x y" in taken(f"{name}=~/x y")
    assert "/home/me/x y" in taken(config_file=file)
    assert "~nobody_here/x" in taken(f"{name}=~nobody_here/x")


def test_every_setting_that_is_called_a_path_is_known_as_one() -> None:
    called = {n for n in all_fields() if n.endswith(("_dir", "_file", "_path", "_from"))}
    assert called <= PATHS
