"""Whether the ranks of a job can share a step."""

import pytest

from model_check.config.arguments import Parser, add_settings_options, settings_request
from model_check.config.derived import num_micro_batches
from model_check.config.load import load
from model_check.config.ranks import (
    SILENCE_PATIENCE,
    check_ranks,
    rank_timeout_s,
    sequences_of_step,
)
from model_check.config.resume import forbidden
from model_check.config.schema import Settings
from model_check.errors import ConfigError


def given(*overrides: str) -> Settings:
    parser = Parser(prog="test")
    add_settings_options(parser)
    names = parser.read(["--preset", "cpu", *overrides])
    return load(settings_request(names, {}), lambda: False).settings


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "each"),
    [
        (["training.grad_accum_nums=3"], 4, 3),
        (["training.global_batch_size=16", "training.batch_size=2"], 4, 2),
        (["training.global_batch_size=16", "training.batch_size=2"], 1, 8),
        (["gradient_accumulation_steps=8"], 4, 2),
        (["optimizer.gradient_accumulation_steps=8"], 1, 8),
    ],
)
def test_a_step_is_shared_among_the_ranks(overrides: list[str], num_ranks: int, each: int) -> None:
    settings = given(*overrides)
    check_ranks(settings, num_ranks)
    assert num_micro_batches(settings, num_ranks) == each


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "said"),
    [
        (
            ["gradient_accumulation_steps=8"],
            3,
            "training.global_grad_accum_nums = 8: 3 ranks cannot share it evenly "
            "(6 and 9 would do; it suits 1, 2, 4, 8 ranks)",
        ),
        (
            ["training.global_batch_size=6", "training.batch_size=2"],
            4,
            "training.global_batch_size = 6: 4 ranks x batch_size 2 cannot share it evenly "
            "(8 would do; it suits 1, 3 ranks)",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_numbers_that_can(
    overrides: list[str], num_ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(given(*overrides), num_ranks)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.grad_accum_nums=2", "gradient_accumulation_steps=4"],
        ["training.batch_size=2", "global_batch_size=16", "gradient_accumulation_steps=4"],
    ],
)
def test_two_numbers_of_micro_batches_that_contradict_are_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        given(*overrides)


def test_a_resumed_run_of_another_number_of_ranks_needs_the_sequences_of_a_step_alone() -> None:
    saved = {"model": {}, "training": {"batch_size": 2, "grad_accum_nums": 4}}
    same = given("training.batch_size=2", "training.grad_accum_nums=2")
    more = given("training.batch_size=2", "training.grad_accum_nums=4")
    assert sequences_of_step(saved["training"], 1) == 8
    assert not [text for text in forbidden(saved, same, (1, 2)) if "accum" in text]
    assert "sequences of a step 8 -> 16" in forbidden(saved, more, (1, 2))
    assert "training.grad_accum_nums 4 -> 2" in forbidden(saved, same, (2, 2))


@pytest.mark.parametrize("step_s", [0.1, 20.0])
@pytest.mark.parametrize("limit_s", ["8", "1000"])
def test_a_rank_gives_a_peer_up_before_its_supervisor_gives_it_up_as_silent(
    limit_s: str, step_s: float
) -> None:
    """Else all were silent alike, and nothing told which of them is not there."""
    launch = given(f"launch.hang_timeout_s={limit_s}").launch
    silence_s = max(float(limit_s), SILENCE_PATIENCE * step_s)
    assert rank_timeout_s(launch, True, step_s) <= silence_s / 2
    assert rank_timeout_s(launch, True, None) <= SILENCE_PATIENCE * float(limit_s) / 2
