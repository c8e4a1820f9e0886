"""The learning rate of each step."""

import pytest

from model_check.config.schema import TrainingSettings
from model_check.engine.schedule import learning_rate


def rates(**settings: object) -> list[float]:
    training = TrainingSettings(**{"learning_rate": 1.0, "max_steps": 10, **settings})  # type: ignore[arg-type]
    return [learning_rate(step, training) for step in range(training.max_steps + 2)]


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert rates() == [1.0] * 12


def test_warm_up_starts_above_zero_and_rises_evenly() -> None:
    assert rates(warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_min_lr_and_stays_there() -> None:
    got = rates(lr_schedule="linear", warmup_steps=2, min_lr=0.2)
    assert got[2:11] == pytest.approx([1.0 - 0.1 * n for n in range(9)])
    assert got[10:] == pytest.approx([0.2, 0.2])


def test_cosine_passes_the_middle_and_never_rises_again() -> None:
    got = rates(lr_schedule="cosine", min_lr=0.5)
    assert got[0] == 1.0
    assert got[5] == pytest.approx(0.75)
    assert got[10:] == [0.5, 0.5]
    assert got == sorted(got, reverse=True)


def test_no_step_is_below_min_lr_not_even_in_the_warm_up() -> None:
    assert min(rates(warmup_steps=8, min_lr=0.5)) == 0.5


def test_a_warm_up_as_long_as_the_run_divides_by_nothing() -> None:
    assert rates(warmup_steps=10, lr_schedule="cosine")[9] == 1.0
