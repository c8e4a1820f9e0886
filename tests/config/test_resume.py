"""Which settings may differ when a run is resumed. Pure."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from model_check.config.load import Request, load
from model_check.config.resume import changes, check_resume, forbidden
from model_check.config.schema import Settings
from model_check.errors import ConfigError


def settings(*overrides: str) -> Settings:
    return load(Request(preset="cpu", overrides=overrides), lambda: False).settings


def saved(*overrides: str) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(settings(*overrides))
    return tree


@pytest.mark.parametrize(
    "override",
    [
        "training.batch_size=7",
        "training.grad_accum_nums=3",
        "training.context_length=64",
        "system.seed=1",
        "data.document_masking=true",
    ],
)
def test_what_makes_the_next_batches_other_ones_is_forbidden(override: str) -> None:
    (text,) = forbidden(saved(), settings(override))
    assert text.startswith(override.partition("=")[0])
    assert text.endswith(f"-> {override.partition('=')[2]}")
    assert changes(saved(), settings(override)) == []


@pytest.mark.parametrize(
    "override",
    [
        "logging.log_interval=9",
        "training.save_interval=2",
        "training.keep_last=2 training.save_interval=2",
        "training.eval_interval=2 data.validation=a=0.1",
        "training.num_workers=0",
        "training.resume=auto",
        "system.checkpoint_dir=elsewhere",
        "system.device=cpu",
        "data.cache_dir=elsewhere",
        "debug.dump_tensors=true",
        "launch.workers=5",
    ],
)
def test_what_changes_no_step_is_not_worth_a_word(override: str) -> None:
    assert forbidden(saved(), settings(*override.split())) == []
    assert changes(saved(), settings(*override.split())) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.max_steps=60", "training.max_steps 30 -> 60"),
        ("training.learning_rate=0.1", "training.learning_rate 0.001 -> 0.1"),
        ("training.max_grad_norm=null", "training.max_grad_norm 1.0 -> null"),
        ("model.attention_backend=eager", "model.attention_backend auto -> eager"),
        ("system.deterministic=false", "system.deterministic true -> false"),
    ],
)
def test_what_makes_the_steps_other_ones_on_purpose_is_told(override: str, told: str) -> None:
    assert forbidden(saved(), settings(override)) == []
    assert changes(saved(), settings(override)) == [told]


def test_a_setting_that_an_older_checkpoint_does_not_know_had_its_default() -> None:
    older = saved()
    del older["training"]["adam_eps"], older["system"]["deterministic"]
    assert changes(older, settings()) == []
    assert changes(older, settings("training.adam_eps=0.1")) == ["training.adam_eps 1e-08 -> 0.1"]


def test_a_path_at_which_there_is_nothing_is_refused(tmp_path: Path) -> None:
    for fine in (None, "auto", str(tmp_path)):
        check_resume(fine)
    with pytest.raises(ConfigError, match=r"training\.resume = .*gone\.pt: no such file"):
        check_resume(str(tmp_path / "gone.pt"))
