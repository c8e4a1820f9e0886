"""Settings of evaluation and saving that would have no effect are refused before anything
starts."""

from pathlib import Path

import pytest

from model_check.config.load import Loaded, Request, load, to_json
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
        (["training.sample_length=9"], "sample_length = 9: needs training.sample_interval"),
        (["training.sample_prompts=p"], "sample_prompts = p: needs training.sample_interval"),
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr.min_lr=1e-6"], "min_lr = 1e-06: needs training.lr_schedule=cosine, linear or wsd"),
        (["training.wsd_decay_share=0.5"], "wsd_decay_share = 0.5: needs training.lr_schedule=wsd"),
        (
            ["training.wsd_decay_share=0.5", "training.lr_schedule=cosine"],
            "wsd_decay_share = 0.5: needs training.lr_schedule=wsd",
        ),
        (["training.async_save=true"], "async_save = true: needs training.save_interval"),
        (["training.resume_anyway=true"], "resume_anyway = true: needs training.resume"),
        (["init_std=0.1", "init_from=a.pt"], "init_std = 0.1: needs random weights (model.init_"),
        (["bpe_vocab_size=500", "tokenizer=model"], "bpe_vocab_size = 500: needs data.tokenizer="),
        (["data.split=test", "dataset=embedded"], "split = test: needs a dataset of the hub"),
        (["dataset_config=x", f"dataset={__file__}"], "dataset_config = x: needs a dataset of"),
        (["text_column=x", "dataset=embedded"], "text_column = x: needs a data.dataset of rows"),
        (["wandb_project=mine"], "wandb_project = mine: needs logging.wandb=online or offline"),
        (["device_id=1", "device=cpu"], "device_id = 1: needs system.device=cuda"),
        (["deterministic=false", "max_lead=3"], "max_lead = 3: needs system.deterministic=true"),
        (["deterministic=false", "replay_s=9"], "replay_s = 9.0: needs system.deterministic"),
    ],
)
def test_a_setting_that_does_nothing_is_refused_with_what_it_needs(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(*overrides)
    assert message in str(refused.value)


def test_what_a_file_asks_for_and_the_command_line_rules_out_is_told(tmp_path: Path) -> None:
    file = tmp_path / "my.json"
    file.write_text('{"training": {"lr_schedule": "cosine", "min_lr": 1e-6}}')
    loaded = load(Request(config_file=file, overrides=("lr_schedule=constant",)), lambda: False)
    assert loaded.notes == (
        f"{file}: training.min_lr = 1e-06 changes nothing here: it needs "
        "training.lr_schedule=cosine, linear or wsd",
    )
    file.write_text('{"training": {"lr_schedule": "constant", "min_lr": 1e-6}}')
    for overrides in ((), ("lr_schedule=constant", "min_lr=1e-6")):
        with pytest.raises(ConfigError, match=r"needs training\.lr_schedule"):
            load(Request(config_file=file, overrides=overrides), lambda: False)


def test_a_setting_that_does_nothing_is_left_to_presets_and_to_defaults(tmp_path: Path) -> None:
    """And a run of such settings writes a file that loads again."""
    overrides = ("training.lr_schedule=constant", "training.save_interval=null")
    given = load(Request(preset="train", overrides=overrides), lambda: False)
    assert given.settings.training.min_lr > 0
    file = tmp_path / "config.json"
    file.write_bytes(to_json(given.settings))
    again = load(Request(config_file=file), lambda: False).settings.training
    assert (again.min_lr, again.keep_last, again.lr_schedule) == (0.0, None, "constant")
    resolve("training.min_lr=0", "training.save_best=false", "deterministic=false", "replay_s=0")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_rate_that_falls_has_a_lowest_one(schedule: str) -> None:
    assert resolve(f"training.lr_schedule={schedule}", "training.min_lr=1e-6")


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


@pytest.mark.parametrize("name", ["compare.json", "default.json", "preset.json", "mine.json"])
def test_a_settings_file_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('{"model": {"infini": {"segment_length": 16}}}')
    with pytest.raises(ConfigError, match=r"needs model\.attention"):
        load(Request(preset="cpu", config_file=Path(name)), lambda: False)
