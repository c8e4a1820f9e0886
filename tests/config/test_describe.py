"""The reference page and `config show` agree with the code."""

import json
from pathlib import Path

from model_check.config.aliases import ALIASES
from model_check.config.describe import reference_page, show
from model_check.config.fields import all_fields
from model_check.config.load import Request, load

PAGE = Path(__file__).parents[2] / "config" / "README.md"


def test_the_reference_page_is_the_one_that_the_code_makes() -> None:
    assert PAGE.read_text() == reference_page()


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
    rows = json.loads(show(loaded, as_json=True))["settings"]
    assert rows["training.weight_decay"] == {"value": 0.1, "source": "default"}


def test_config_show_tells_how_large_the_model_is() -> None:
    loaded = load(Request(overrides=("model.geometry=tiny",)), lambda: False)
    last = show(loaded).splitlines()[-1]
    assert last.startswith("model: 9,014,528 parameters with a vocabulary of 8,192 (the tokenizer")
    assert "MiB: weights 34, " in last
