"""Many rounds, one after the other: `python -m tests.launcher.supervise.chaos.storm`.

A round that broke a promise is told with its seed; `--seed S --first N --rounds 1` plays it again
(its plan is the same each time, the kernel's timing is not).
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.contain import cgroup
from tests.launcher.supervise.chaos.plan import draw
from tests.launcher.supervise.chaos.play import Played, Stage
from tests.launcher.supervise.chaos.promises import broken_promises, news_s, told


def storm(directory: Path, seed: int, rounds: Iterable[int]) -> Iterator[tuple[Played, str]]:
    """Each round, and what was broken in it (empty: nothing). Where no cgroup can be made, rounds
    that need one are left out."""
    stage, holds = Stage(directory), has_cgroups()
    try:
        for index in rounds:
            plan = draw(f"{seed}/{index}")
            if plan.needs_cgroup and not holds:
                continue
            played = stage.play(plan)
            broken = broken_promises(played)
            yield played, told(played, broken) if broken else ""
            stage.complaints.write_bytes(b"")
    finally:
        stage.close()


def has_cgroups() -> bool:
    """Whether a cgroup of version 2 may be made here, which alone holds a child that changed its
    session and its user or environment when the supervisor is killed."""
    if (made := cgroup.make()) is None:
        return False
    cgroup.clear(made.directory)
    made.close()
    return True


@dataclass
class Tally:
    """What a storm was."""

    num_broken: int = 0
    walls: list[float] = field(default_factory=list)
    news: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, played: Played, broken: str) -> None:
        self.num_broken += bool(broken)
        self.walls.append(played.wall_s)
        self.news += filter(None, [news_s(played)])
        self.kinds.update((played.plan.theme, *played.plan.mischief))

    def told(self, total_s: float) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return (
            f"{len(self.walls)} rounds in {total_s:.0f} s, {self.num_broken} broken;"
            f" longest round {max(self.walls, default=0):.1f} s;"
            f" news of a failure in a flood after {max(self.news, default=0):.2f} s at most\n"
            f"rounds by theme and mischief: {kinds}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    tally, started = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        indices = range(options.first, options.first + options.rounds)
        for played, broken in storm(Path(directory), options.seed, indices):
            tally.add(played, broken)
            if broken:
                print(broken, flush=True)
    total_s = time.monotonic() - started
    print(f"seed {options.seed}: {tally.told(total_s)}")
    if left_out := options.rounds - len(tally.walls):
        print(f"{left_out} rounds left out: no cgroup of version 2 can be made here")
    if os.geteuid() != 0:
        print("setuid children kept their user: only root can change it")
    return 1 if tally.num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
