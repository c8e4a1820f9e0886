"""Ticks of charts: round numbers, room beyond them, and no value that breaks them."""

import math

import pytest

from launcher.report.page.axes import Axis, of_seconds, of_steps, of_values


def texts(axis: Axis) -> list[str]:
    return [tick.text for tick in axis.ticks]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (6.2384, 6.2623, ["6.23", "6.24", "6.25", "6.26", "6.27"]),
        (1.0, 31.7, ["0", "10", "20", "30", "40"]),
        (-0.2, 0.5, ["-0.2", "0.0", "0.2", "0.4", "0.6"]),
        (1141, 4702, ["1,000", "2,000", "3,000", "4,000", "5,000"]),
        (5.0, 5.0, ["4.6", "4.8", "5.0", "5.2", "5.4"]),
        (1e-9, 3e-9, ["1e-09", "1.5e-09", "2e-09", "2.5e-09", "3e-09"]),
    ],
)
def test_values(low: float, high: float, shown: list[str]) -> None:
    axis = of_values(low, high)
    assert texts(axis) == shown
    assert 0 < axis.scale(low) <= axis.scale(high) < axis.scale(axis.scale.high)


def test_heights_in_proportion_begin_at_zero() -> None:
    axis = of_values(640, 690, from_zero=True)
    assert texts(axis) == ["0", "200", "400", "600", "800"]
    assert axis.scale(0) == 0


@pytest.mark.parametrize("low", [0.0, 5e-324, -1e308, -1.7e308, 3.4e38])
@pytest.mark.parametrize("high", [1e-323, 1e-300, 1.0, 3.4e38, 1.7e308])
def test_any_number_that_is_finite_has_an_axis(low: float, high: float) -> None:
    for from_zero in (False, True):
        axis = of_values(min(low, high), max(low, high), from_zero=from_zero)
        assert 1 <= len(axis.ticks) <= 8
        assert all(math.isfinite(tick.at) for tick in axis.ticks)


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        (0, 0, ["0"]),
        (0, 3, ["0", "1", "2", "3"]),
        (57, 64, ["58", "60", "62", "64"]),
        (0, 9999, ["0", "2,000", "4,000", "6,000", "8,000"]),
    ],
)
def test_steps_are_whole(first: int, last: int, shown: list[str]) -> None:
    assert texts(of_steps(first, last)) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, ["0 s"]),
        (231.0, ["0 s", "50 s", "100 s", "150 s", "200 s"]),
        (621.0, ["0 min", "5 min", "10 min"]),
        (90_000.0, ["0 h", "5 h", "10 h", "15 h", "20 h", "25 h"]),
    ],
)
def test_times_have_the_unit_that_they_are_told_in(seconds: float, shown: list[str]) -> None:
    assert texts(of_seconds(seconds)) == shown
    assert of_seconds(seconds, unit=1000).ticks[-1].at == 1000 * of_seconds(seconds).ticks[-1].at
