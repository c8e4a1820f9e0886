"""Many rounds, one after the other: `python -m tests.launcher.supervise.chaos.storm`.

A round that broke a promise is told with its seed; `--seed S --first N --rounds 1` plays it again
(its plan is the same each time, the kernel's timing is not).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.launcher.supervise.chaos.plan import draw
from tests.launcher.supervise.chaos.play import Played, Stage
from tests.launcher.supervise.chaos.promises import broken_promises, told


def storm(directory: Path, seed: int, rounds: Iterable[int]) -> Iterator[tuple[Played, str]]:
    """Each round, and what was broken in it (empty: nothing)."""
    stage = Stage(directory)
    try:
        for index in rounds:
            played = stage.play(draw(f"{seed}/{index}"))
            broken = broken_promises(played)
            yield played, told(played, broken) if broken else ""
            stage.complaints.write_bytes(b"")
    finally:
        stage.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    num_broken, walls, started = 0, [], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        indices = range(options.first, options.first + options.rounds)
        for played, broken in storm(Path(directory), options.seed, indices):
            walls.append(played.wall_s)
            num_broken += bool(broken)
            if broken:
                print(broken, flush=True)
    total_s = time.monotonic() - started
    print(
        f"seed {options.seed}: {len(walls)} rounds in {total_s:.0f} s, {num_broken} broken;"
        f" longest round {max(walls):.1f} s"
    )
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
