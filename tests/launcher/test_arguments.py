"""What a command line asks for."""

import os
import re
from pathlib import Path

import pytest

from launcher.arguments import RunArguments, parse_run, parse_train
from launcher.doctor.preflight import check_worker_settings
from launcher.verbs import RUN, VERBS, Verb
from model_check.config.load import load
from model_check.errors import ConfigError, DataError, UsageError
from tests.in_process import answer_of


def parse(*argv: str) -> RunArguments:
    return parse_run(argv, {})


def test_options_become_settings_with_their_own_name_as_source() -> None:
    flags = parse("--gpus", "0,2", "--grace", "3", "--hang-timeout", "60").request.flags
    assert flags["launch.gpus"] == ("--gpus", "0,2")
    assert flags["launch.grace_s"] == ("--grace", "3")
    assert flags["launch.hang_timeout_s"] == ("--hang-timeout", "60")


def test_dashes_and_underscores_are_alike() -> None:
    assert parse("--max_steps", "3").request.flags == parse("--max-steps=3").request.flags
    assert parse("--dry_run").dry_run


def test_underscores_in_values_are_left_alone() -> None:
    assert str(parse("--run_dir=/a_b/c_d").run_dir) == "/a_b/c_d"


def test_overrides_may_stand_anywhere_among_the_options() -> None:
    request = parse("a.b=1", "--debug", "c.d=2", "--max-steps", "3", "e.f=4").request
    assert request.overrides == ("a.b=1", "c.d=2", "e.f=4")
    assert request.preset == "debug"


def test_everything_after_two_dashes_is_the_command_to_the_letter() -> None:
    arguments = parse("--gpu", "1", "--", "tool", "--max_steps", "--", "a b")
    assert arguments.command == ("tool", "--max_steps", "--", "a b")
    assert arguments.request.flags["launch.gpus"][1] == "1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-stepz", "3"], "did you mean --max-steps"),
        (["--gpu", "0", "--gpus", "1"], "the same option"),
        (["--"], "nothing after --"),
        (["--gpus"], "expected one argument"),
        (["--pre", "debug"], "no such option"),
        (["--preset", "debug", "config", "show"], "a verb comes first: run.sh config"),
        (["dokter"], "did you mean doctor"),
        (["--run-dir", ""], "--run-dir: the path is empty"),
        (["--config="], "--config: the path is empty"),
        (["--soak", "5x"], "--soak: '5x' is no time: give seconds, or 90s, 30m, 8h"),
    ],
)
def test_what_is_not_understood_is_one_message(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.d", "~nobody"])
def test_what_is_trained_on_is_a_path_where_it_has_one_word(name: str) -> None:
    with pytest.raises(UsageError, match=rf"train {name}: no such file or directory \(/.*{name}\)"):
        parse_train([name], {})


@pytest.mark.parametrize(("mode", "num"), [("replicate", 1), ("ddp", 2)])
def test_a_training_has_one_worker_and_a_job_all(tmp_path: Path, mode: str, num: int) -> None:
    asked = ("train", "embedded", "--mode", mode, "--device", "cpu", "--dry-run")
    plan = answer_of(*asked, cwd=tmp_path, env=dict(os.environ)).stdout
    assert plan.count("MODEL_CHECK_WORKER=") == num


@pytest.mark.parametrize("name", ["launcher", "wikitext", "owner/name", "launcher/"])
def test_what_is_there_or_may_be_on_the_hub_is_trained_on(name: str) -> None:
    settings = load(parse_train([name], {}).request, lambda: False).settings
    check_worker_settings(settings)
    assert settings.data.dataset == name


@pytest.mark.parametrize(
    "name", ["./nowhere", "nowhere/", "/nowhere", "a/b/c", "no.txt", "x.MD.gz"]
)
def test_a_path_that_is_not_there_is_refused_before_anything_starts(name: str) -> None:
    settings = load(parse(f"data.dataset={name}").request, lambda: False).settings
    with pytest.raises(DataError, match=rf"'{re.escape(name)}': no such file or directory \(/"):
        check_worker_settings(settings)


def test_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for told in ("69      no usable GPU", "21      one worker is named", "23      workers differ"):
        assert any(told in line for line in lines)
    assert any(line.startswith("  report RUN_DIR ... ") for line in lines), "not as a table"


def test_a_setting_may_be_written_in_the_way_of_hydra() -> None:
    assert parse("--training.max_steps=3").request.overrides == ("training.max_steps=3",)


def test_a_setting_in_that_way_needs_its_value_behind_an_equals_sign() -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load(parse("--training.max_steps", "3").request, lambda: False)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("frob", "'frob': no verb, no option"),
        ("reprot", "did you mean report?"),
        ("wacth", "did you mean watch?"),
        ("helath", "did you mean doctor?"),
        ("status", "did you mean watch?"),
        ("gpt2/train.py", "gpt2/train.py: run.sh trains by itself: leave it out (`-- pytho"),
    ],
)
def test_a_word_that_is_no_verb_is_told_so(word: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        parse(word)


@pytest.mark.parametrize(("verb", "is_listed"), [(RUN, True), (VERBS["doctor"], False)])
def test_the_help_of_a_verb_lists_nothing_that_it_refuses(
    verb: Verb, is_listed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_run(["--help"], {}, verb)
    told = capfd.readouterr().out
    for option in ("--dry-run", "--gpu-model", "--run-dir", "--arm", "--run-both-models"):
        assert (f"  {option} " in told or f"  {option}\n" in told) is is_listed, option
    assert "--gpus WHICH" in told
