"""What a command line says of the arms of a comparison."""

import pytest

from launcher.arguments import parse_run
from launcher.compare.arms import BOTH_ARMS, Arm, split_arms
from model_check.config.load import Loaded, load
from model_check.errors import ConfigError, UsageError

BOTH = ("--run-both-models",)


def loaded(*argv: str) -> dict[str, Loaded]:
    arguments = parse_run(argv, {})
    return {arm.name: load(arm.of(arguments.request), lambda: False) for arm in arguments.arms}


def test_an_arm_goes_on_to_the_next_option() -> None:
    rest, arms = split_arms(
        ["train", "texts", "--arm", "a", "x=1", "y=2", "--debug", "z=3", "--arm=b", "--arm", "c"]
    )
    assert rest == ["train", "texts", "--debug", "z=3"]
    assert arms == (Arm("a", ("x=1", "y=2")), Arm("b", ()), Arm("c", ()))


def test_underscores_and_dashes_are_as_everywhere() -> None:
    assert split_arms(["--run_both_models"]) == ([], BOTH_ARMS)
    assert split_arms(["--arm", "a", "--training.max_steps=3", "--max_steps=4"]) == (
        ["--max_steps=4"],
        (Arm("a", ("training.max_steps=3",)),),
    )


def test_both_models_are_two_arms() -> None:
    assert split_arms(["--run-both-models", "x=1"]) == (["x=1"], BOTH_ARMS)
    assert {name: each.settings.model.attention for name, each in loaded(*BOTH).items()} == {
        "full": "full",
        "infini": "infini",
    }


def test_arms_are_a_comparison_without_its_option() -> None:
    assert all(each.settings.launch.mode == "compare" for each in loaded(*BOTH).values())


def test_what_an_arm_says_wins_over_options_and_files() -> None:
    arms = loaded("--max-steps=7", "--arm", "a", "--arm", "b", "max_iters=9")
    assert [each.settings.training.max_steps for each in arms.values()] == [7, 9]
    assert arms["b"].sources["training.max_steps"] == "--arm b"


def test_what_all_arms_are_given_need_not_act_in_each() -> None:
    arms = loaded("model.infini.segment_length=16", *BOTH)
    assert arms["full"].inert == {"model.infini.segment_length"}
    assert "changes nothing here" in " ".join(arms["full"].notes)
    assert not arms["infini"].inert


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--arm",), "--arm : give it a name first"),
        (("--arm", "--debug"), "--arm --debug: give it a name first"),
        (("--arm", "../x"), "--arm ../x: give it a name first"),
        (("--arm", "a" * 41), "at most 40"),
        (("--arm", "a", "--arm", "A"), "a and A: each arm needs a name of its own"),
        (("--arm", "infini", *BOTH), "each arm needs a name of its own"),
        (("--arm", "full.log"), "--arm full.log: a worker or a file has such a name"),
        (("--arm", "launcher"), "--arm launcher: a worker or a file has such a name"),
        (("--arm", "GPU0"), "--arm GPU0: a worker or a file has such a name"),
        (("--arm", "hf_Llama3base9x8y7z6w5v4u"), "looks like a secret"),
        (("--arm", "a", "fast"), "--arm a: 'fast' is not section.key=value"),
        (("--mode=ddp", *BOTH), "--arm: --mode ddp has no arms"),
    ],
)
def test_bad_arms_are_refused(argv: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_run(argv, {})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("max_step=3", "did you mean training.max_steps"),
        ("launch.gpus=0", "--arm a: launch.gpus is one for all arms"),
        ("seed=7", "--arm a: system.seed is one for all arms"),
        ("system.device=cuda", "one for all arms"),
        ("training.max_steps=x", "--arm a: training.max_steps"),
        ("model.infini.gate_lr=1", "--arm a: model.infini.gate_lr = 1.0: needs model.attention"),
    ],
)
def test_bad_settings_of_an_arm_are_refused(override: str, told: str) -> None:
    with pytest.raises((ConfigError, UsageError)) as refused:
        loaded("--arm", "a", override, "--arm", "b")
    assert told in str(refused.value)
