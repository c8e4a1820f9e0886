"""Workers that are slower than their equals, by what each step keeps their devices busy. Pure over
step events."""

from collections import deque
from collections.abc import Mapping
from itertools import islice
from statistics import median, median_high

from msgspec import Struct, field

from model_check.events import Step

WARM_UP = 5
"""The first steps of a worker tell nothing."""
LIMIT = 1.15
IN_A_ROW = 10
"""So many steps above LIMIT, one after the other, are slow. On two cores that 4 workers and other
work share, none of 5,720 clean steps was above LIMIT."""
MIN_USUAL, MAX_USUAL = 10, 500
"""How many of its own earlier steps a worker is compared with, where it has too few equals."""
_MAX_KEPT = 500
"""Steps of a slow stretch that its figures are made of, from its first on."""
_MAX_OPEN = 64
"""Steps of a group that wait for one of its workers, which may never come."""


class Slow(Struct, frozen=True):
    """The longest stretch of slow steps of one worker. Times are medians over it."""

    since_step: int
    last_step: int
    num_steps: int
    ratio: float
    busy_ms: float
    expected_ms: float
    """Of its equals in the same steps; with fewer than two of them, of its own earlier steps."""
    by_history: bool
    lasted: bool
    """To the last step that was compared."""
    since_ns: int
    last_ns: int
    """When these steps were told, CLOCK_MONOTONIC."""

    def __str__(self) -> str:
        than = "its own earlier steps" if self.by_history else "its equals"
        until = f"since step {self.since_step}"
        if not self.lasted:
            until = f"in steps {self.since_step} to {self.last_step}"
        times = f"{self.busy_ms:,.4g} ms against {self.expected_ms:,.4g} ms"
        return f"slow: {self.ratio:.2f} x {than} {until} ({times})"


class _Stretch(Struct):
    """Steps above LIMIT, one after the other."""

    since: Step
    last: Step
    num_steps: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)
    """(milliseconds, what was expected)"""

    def add(self, step: Step, busy_ms: float, expected_ms: float) -> None:
        self.last = step
        self.num_steps += 1
        if len(self.busy) < _MAX_KEPT:
            self.busy.append((busy_ms, expected_ms))


class _Track(Struct):
    """What is kept of one worker."""

    num_seen: int = 0
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_USUAL))
    """Milliseconds of its latest steps that were not slow."""
    current: _Stretch | None = None
    longest: _Stretch | None = None

    @property
    def usual_ms(self) -> float | None:
        """None: too few steps to tell."""
        return median(self.usual) if len(self.usual) >= MIN_USUAL else None

    def take(self, step: Step, busy_ms: float, expected_ms: float | None) -> None:
        if expected_ms is None or busy_ms <= LIMIT * expected_ms:
            self.current = None
            self.usual.append(busy_ms)
            return
        self.current = self.current or _Stretch(step, step)
        self.current.add(step, busy_ms, expected_ms)
        if self.longest is None or self.current.num_steps > self.longest.num_steps:
            self.longest = self.current


class Slowness:
    """Compares a step once its whole group has told it, in bounded memory.

    With two equals or more: with the median of theirs (of two, the larger: one that is faster makes
    nobody slow), so a group that is slow as a whole names nobody. With fewer: with the median of
    its own earlier steps, and a slowdown that the other one of two has in the same step does not
    count.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        """`groups`: worker -> the group of its equals."""
        self._groups = groups
        self._members: dict[str, list[str]] = {}
        for worker, group in groups.items():
            self._members.setdefault(group, []).append(worker)
        self._tracks = {worker: _Track() for worker in groups}
        self._open: dict[str, dict[int, dict[str, Step | None]]] = {g: {} for g in self._members}
        """Group -> step -> worker -> its event; None: a step that tells nothing."""

    def record(self, worker: str, step: Step) -> None:
        group, track = self._groups[worker], self._tracks[worker]
        track.num_seen += 1
        tells = track.num_seen > WARM_UP and step.busy_ms is not None
        waiting = self._open[group]
        told = waiting.setdefault(step.step, {})
        told[worker] = step if tells else None
        if len(told) == len(self._members[group]):
            del waiting[step.step]
            self._compare({name: each for name, each in told.items() if each is not None}, group)
        for number in list(islice(waiting, max(0, len(waiting) - _MAX_OPEN))):
            del waiting[number]

    @property
    def found(self) -> dict[str, Slow]:
        """The slow workers so far."""
        by_history = {w: len(self._members[group]) < 3 for w, group in self._groups.items()}
        return {
            worker: _slow(track.longest, by_history[worker], track.longest is track.current)
            for worker, track in self._tracks.items()
            if track.longest is not None and track.longest.num_steps >= IN_A_ROW
        }

    def _compare(self, steps: Mapping[str, Step], group: str) -> None:
        if len(steps) < len(self._members[group]):
            return
        busy_ms = {name: step.busy_ms or 0.0 for name, step in steps.items()}
        few = len(steps) < 3
        expected_ms = self._by_history(busy_ms) if few else _by_equals(busy_ms)
        for name, step in steps.items():
            self._tracks[name].take(step, busy_ms[name], expected_ms[name])

    def _by_history(self, busy_ms: Mapping[str, float]) -> dict[str, float | None]:
        usual_ms = {name: self._tracks[name].usual_ms for name in busy_ms}
        slowdowns = {name: busy_ms[name] / usual for name, usual in usual_ms.items() if usual}
        return {
            name: usual and usual * max([1.0, *(slowdowns[n] for n in slowdowns if n != name)])
            for name, usual in usual_ms.items()
        }


def _by_equals(busy_ms: Mapping[str, float]) -> dict[str, float | None]:
    return {
        name: median_high(ms for other, ms in busy_ms.items() if other != name) for name in busy_ms
    }


def _slow(stretch: _Stretch, by_history: bool, lasted: bool) -> Slow:
    return Slow(
        since_step=stretch.since.step,
        last_step=stretch.last.step,
        num_steps=stretch.num_steps,
        ratio=round(median(busy / expected for busy, expected in stretch.busy), 3),
        busy_ms=median(busy for busy, _ in stretch.busy),
        expected_ms=median(expected for _, expected in stretch.busy),
        by_history=by_history,
        lasted=lasted,
        since_ns=stretch.since.t,
        last_ns=stretch.last.t,
    )
