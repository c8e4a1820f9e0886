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


def test_wsd_is_stable_and_then_falls_in_a_line_to_min_lr() -> None:
    got = rates(lr_schedule="wsd", wsd_decay_share=0.4, warmup_steps=2, min_lr=0.2)
    assert got[:7] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert got[7:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])


def test_wsd_never_falls_before_the_warm_up_is_over() -> None:
    got = rates(lr_schedule="wsd", wsd_decay_share=1.0, warmup_steps=5)
    assert got[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert got[6:11] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_every_schedule_keeps_within_its_bounds_and_starts_above_zero(schedule: str) -> None:
    got = rates(lr_schedule=schedule, warmup_steps=3, min_lr=0.1)
    assert got[0] == pytest.approx(1 / 3)
    assert all(0.1 <= rate <= 1.0 for rate in got)
