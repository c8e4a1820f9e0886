"""Where a chart's ticks stand, and what is written at them: round numbers, with room beside the
lowest and the highest value. Pure."""

import math
from collections.abc import Sequence

from msgspec import Struct

SIDE = 400
"""Of the square in which each picture is drawn, whatever becomes of its shape: a pixel or less."""
_MARGIN = 0.06
"""Of the axis, beyond the outermost value at either end: no curve lies on the frame."""
_NUM_STEPS, _NUM_VALUES = 5, 4
"""Ticks along an axis, up and down; about."""
_LARGEST = 1e300
_TIMES = ((7200, 3600, "h"), (300, 60, "min"), (0, 1, "s"))
"""Seconds from which on an axis counts in this unit."""


class Scale(Struct, frozen=True):
    low: float
    high: float

    def __call__(self, value: float) -> int:
        return round(SIDE * self._share(value))

    def percent(self, value: float) -> float:
        return round(100 * self._share(value), 1)

    def _share(self, value: float) -> float:
        width = (self.high - self.low) or 1.0
        return min(1.0, max(0.0, (value - self.low) / width))


class Tick(Struct, frozen=True):
    at: float
    text: str


class Axis(Struct, frozen=True):
    scale: Scale
    ticks: Sequence[Tick]


def of_values(low: float, high: float, *, from_zero: bool = False) -> Axis:
    """An axis from a round number to a round number, with room beyond both."""
    low, high = (min(max(value, -_LARGEST), _LARGEST) for value in (low, high))
    low = min(low, 0.0) if from_zero else low
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / _LARGEST):  # flat: in the middle
        room = abs(high) / 20 if abs(high) > 1 / _LARGEST else 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / _NUM_VALUES)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    room = _MARGIN * (last - first) * step
    scale = Scale(first * step - (0 if from_zero and not low else room), last * step + room)
    return Axis(scale, _ticks(first, last, step))


def of_steps(first: float, last: float) -> Axis:
    """Whole numbers."""
    step = max(1, round(_round_step((last - first) / _NUM_STEPS)))
    room = max(_MARGIN / 3 * (last - first), 0.5 * (first == last))
    ticks = _ticks(math.ceil(first / step), math.floor(last / step), step)
    return Axis(Scale(first - room, last + room), ticks)


def of_seconds(last: float, unit: float = 1) -> Axis:
    """From the start of a run. `unit`: what a second is on the axis."""
    _, seconds, name = next(each for each in _TIMES if last >= each[0])
    step = _round_step(last / seconds / _NUM_STEPS)
    ticks = _ticks(0, math.floor(last / seconds / step), step)
    named = [Tick(tick.at * seconds * unit, f"{tick.text} {name}") for tick in ticks]
    return Axis(Scale(0, last * unit), named)


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten: the smallest that is not below."""
    if not least:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _ticks(first: int, last: int, step: float) -> list[Tick]:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    form = f"{{:,.{digits}f}}" if digits < 5 and step * abs(last) < 1e7 else "{:.4g}"
    return [Tick(at * step, form.format(at * step)) for at in range(first, last + 1)]
