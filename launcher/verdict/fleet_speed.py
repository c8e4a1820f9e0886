"""Workers that are slower than their equals in the whole fleet, by the rule of a single run
(`slow`): so many steps in a row, each above a limit of what equals took. Pure.

Of a long run blocks of steps are compared, each by its quickest step: what is slow for less than a
block is left to the run itself.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from launcher.verdict.fleet import Place
from launcher.verdict.slow import LIMIT, WARM_UP
from launcher.verdict.trace import Block, Trace

_ENOUGH = 3
"""Workers, in two runs or more: of two nobody knows which is the slow one."""


class SlowInFleet(NamedTuple):
    ratio: float
    """Its time as a multiple of its equals', the median over its slow blocks."""
    busy_ms: float
    expected_ms: float
    since: int
    """Index of the first slow step, from the first that was told."""
    num_steps: int
    lasted: bool
    """To the last step that was measured."""

    def text(self, first_step: int) -> str:
        since = first_step + self.since
        until = f"since step {since}"
        if not self.lasted:
            until = f"in {self.num_steps} steps from step {since} on"
        times = f"{self.busy_ms:,.4g} ms against {self.expected_ms:,.4g} ms"
        return f"slow: {self.ratio:.2f} x its equals in the fleet {until} ({times})"


class Speeds(NamedTuple):
    slow: dict[Place, SlowInFleet]
    speed: dict[Place, float]
    """As a multiple of the group's median: 0.8 is slower."""


def speeds(traces: Mapping[Place, Trace]) -> Speeds:
    """Of the members of one group."""
    measured = {place: trace for place, trace in traces.items() if trace.least_ms}
    if len(measured) < _ENOUGH or len({run for run, _ in measured}) < 2:
        return Speeds({}, {})
    block = max(trace.block for trace in measured.values())
    blocks = {place: trace.busy_by(block) for place, trace in measured.items()}
    blocks = {place: each for place, each in blocks.items() if each}
    expected: dict[Place, list[float | None]] = {place: [] for place in blocks}
    for at in range(max((len(each) for each in blocks.values()), default=0)):
        for place, ms in _expected({p: e[at].middle for p, e in blocks.items() if at < len(e)}):
            expected[place].append(ms)
    slow = {p: _slow(each, expected[p], block) for p, each in blocks.items()}
    return Speeds({p: s for p, s in slow.items() if s is not None}, _speeds(blocks, expected))


def _expected(middles: Mapping[Place, float]) -> list[tuple[Place, float | None]]:
    """Of each the upper median of the others'; None: there are too few."""
    ordered = sorted(middles.values())
    middle = (len(ordered) - 1) // 2
    told: list[tuple[Place, float | None]] = []
    for place, ms in middles.items():
        at = bisect_left(ordered, ms)
        others = (
            ordered[middle + 1 if at <= middle else middle] if len(ordered) >= _ENOUGH else None
        )
        told.append((place, others))
    return told


def _slow(
    blocks: Sequence[Block], expected: Sequence[float | None], block: int
) -> SlowInFleet | None:
    pairs = list(enumerate(zip(blocks, expected, strict=True)))
    bad = [(at, each, ms) for at, (each, ms) in pairs if ms and each.least > LIMIT * ms]
    if not bad:
        return None
    return SlowInFleet(
        ratio=round(median(each.middle / ms for _, each, ms in bad), 3),
        busy_ms=median(each.middle for _, each, _ in bad),
        expected_ms=median(ms for _, _, ms in bad),
        since=WARM_UP + bad[0][0] * block,
        num_steps=len(bad) * block,
        lasted=bad[-1][0] == len(blocks) - 1 and len(bad) == len(blocks) - bad[0][0],
    )


def _speeds(
    blocks: Mapping[Place, Sequence[Block]], expected: Mapping[Place, Sequence[float | None]]
) -> dict[Place, float]:
    found = {}
    for place, each in blocks.items():
        pairs = zip(each, expected[place], strict=True)
        ratios = [ms / block.middle for block, ms in pairs if ms and block.middle > 0]
        if ratios:
            found[place] = round(median(ratios), 3)
    return found
