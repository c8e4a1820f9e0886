"""Settings of evaluation and saving that would have no effect are refused before anything
starts."""

from pathlib import Path

import pytest

from model_check.config.load import Loaded, Request, load
from model_check.errors import ConfigError

HELD = "data.validation=held=0.1"
EVERY = "training.eval_interval=5"


def resolve(*overrides: str) -> Loaded:
    return load(Request(preset="cpu", overrides=overrides), lambda: False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.save_best=true", HELD], "save_best = true: needs training.eval_interval"),
        (["training.eval_batches=2", HELD], "eval_batches = 2: needs training.eval_interval"),
        (["training.best_split=held", HELD], "best_split = held: needs training.eval_interval"),
        ([EVERY], "eval_interval = 5: there is no validation split; name one with data.validation"),
        ([EVERY, HELD, "training.best_split=b"], "best_split = b: data.validation names held"),
        (["training.keep_last=2"], "keep_last = 2: needs training.save_interval"),
    ],
)
def test_what_could_not_act_is_refused_with_its_source(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(*overrides)
    assert message in str(refused.value)
    assert "training." in str(refused.value).partition(": ")[0], "the setting that was given"


def test_what_can_act_is_taken() -> None:
    resolve(EVERY, HELD, "training.best_split=held", "training.save_best=true")
    resolve("training.save_interval=2", "training.keep_last=1")


def test_text_that_is_not_there_cannot_validate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held = .*gone\.txt: no such file or directory"):
        resolve(f"data.validation=held={tmp_path}/gone.txt")
    (tmp_path / "there.txt").touch()
    resolve(f"data.validation=held={tmp_path}/there.txt,part=0.1,own=split:test,b=composer:Bach")


@pytest.mark.parametrize(
    "override",
    [
        "system.num_threads=4097",
        "training.num_workers=257",
        "training.batch_size=2147483649",
        "training.global_batch_size=2147483649",
        "training.context_length=2147483649",
        "training.context_length=99999999999999999999999",
    ],
)
def test_numbers_that_nothing_could_hold_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected int >= [01] <= "):
        resolve(override)
