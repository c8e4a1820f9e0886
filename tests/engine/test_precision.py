"""training.precision and training.use_amp: one of them says it, and torch's dtype follows."""

from pathlib import Path

import pytest
import torch

from model_check.config.derived import precision
from model_check.config.load import Request, load, to_json
from model_check.config.schema import TrainingSettings
from model_check.engine.device import compute_dtype
from model_check.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"use_amp": False}, torch.float32),
        ({"precision": "fp16"}, torch.float16),
        ({"precision": "float16"}, torch.float16),
        ({"precision": "bf16", "use_amp": False}, torch.bfloat16),
        ({"precision": "float32"}, torch.float32),
    ],
)
def test_precision_replaces_use_amp(settings: dict[str, object], dtype: torch.dtype) -> None:
    assert compute_dtype(TrainingSettings(**settings), CPU) == dtype  # type: ignore[arg-type]


def loaded(*overrides: str) -> TrainingSettings:
    return load(Request(preset="cpu", overrides=overrides), lambda: False).settings.training


def test_a_preset_without_amp_does_not_contradict_a_precision() -> None:
    assert precision(loaded("training.precision=bf16")) == "bf16"


def test_the_name_of_another_trainer_is_understood() -> None:
    assert precision(loaded("system.dtype=float16")) == "fp16"


def test_the_resolved_settings_of_a_run_do_not_contradict_themselves(tmp_path: Path) -> None:
    given = load(Request(preset="debug", overrides=("training.precision=fp16",)), lambda: False)
    (tmp_path / "config.json").write_bytes(to_json(given.settings))
    again = load(Request(config_file=tmp_path / "config.json"), lambda: False)
    assert precision(again.settings.training) == "fp16"
    assert again.settings.training.use_amp


@pytest.mark.parametrize(
    "both",
    [
        ("training.use_amp=false", "training.precision=bf16"),
        ("training.use_amp=true", "training.precision=fp32"),
    ],
)
def test_two_answers_to_one_question_are_refused(both: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"use_amp = \w+ contradicts training\.precision = \w+"):
        loaded(*both)
