"""The reference page and `config show` agree with the code."""

import json
from pathlib import Path

from model_check.config.aliases import ALIASES
from model_check.config.describe import reference_page, show
from model_check.config.fields import all_fields
from model_check.config.load import Request, load

PAGE = Path(__file__).parents[2] / "config" / "README.md"


def test_the_reference_page_is_the_one_that_the_code_makes() -> None:
    cure = "python -m model_check.config.describe > config/README.md"
    assert PAGE.read_text() == reference_page(), cure


def test_every_setting_has_a_meaning() -> None:
    assert [field.name for field in all_fields().values() if not field.doc] == []


def test_every_alias_means_an_existing_setting_and_hides_none() -> None:
    assert set(ALIASES.values()) <= set(all_fields())
    assert not set(ALIASES) & set(all_fields())


def test_config_show_names_the_source_of_each_value() -> None:
    loaded = load(Request(preset="debug", overrides=("training.max_steps=3",)), lambda: False)
    lines = {line.split()[0]: line for line in show(loaded).splitlines()[:-1]}
    assert set(lines) == set(all_fields())
    assert lines["training.max_steps"].split()[1:] == ["3", "training.max_steps=3"]
    assert lines["model.num_layers"].endswith("preset debug")
    document = json.loads(show(loaded, as_json=True))
    assert (document["schema"], document["kind"]) == (1, "settings")
    rows = document["settings"]
    assert rows["training.weight_decay"] == {"value": 0.1, "source": "default"}


def test_config_show_has_what_acts_where_another_setting_replaces_one() -> None:
    batches = ("batch_size=128", "micro_batch_size=32")
    more = ("training.precision=bf16", "launch.fail_on_health=true")
    loaded = load(Request(overrides=(*batches, *more)), lambda: False)
    rows = json.loads(show(loaded, as_json=True))["settings"]
    for name, value, source in (
        ("training.grad_accum_nums", 4, "training.global_batch_size"),
        ("training.use_amp", True, "training.precision"),
        ("launch.fail_on", ["isolate", "reset", "monitor", "speed"], "launch.fail_on_health"),
    ):
        assert rows[name] == {"value": value, "source": f"follows {source}"}
        assert f"follows {source}" in show(loaded)
    of_job = load(Request(overrides=("global_grad_accum_nums=3",)), lambda: False)
    follows = {"value": 3, "source": "follows training.global_grad_accum_nums"}
    shown = json.loads(show(of_job, as_json=True))["settings"]
    assert shown["training.grad_accum_nums"] == follows


def test_config_show_tells_how_large_the_model_is() -> None:
    loaded = load(Request(overrides=("model.geometry=tiny",)), lambda: False)
    last = show(loaded).splitlines()[-1]
    assert last.startswith("model: 9,014,528 parameters with a vocabulary of 8,192 (the tokenizer")
    assert "MiB: weights 34, " in last
