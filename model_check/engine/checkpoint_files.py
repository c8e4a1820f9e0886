"""The checkpoints of one directory: their names, which is the newest, which may go."""

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

LAST = "last.pt"
BEST = "best.pt"
_STEP = re.compile(r"step_(0|[1-9]\d*)\.pt")
_LEFTOVER = re.compile(r"\.(last|best|(nan_grad_)?step_\d+)\.pt\.\w+\.tmp")
_LEFTOVER_AGE_S = 10.0
"""A younger one may belong to a writer that has not locked it yet."""


def checkpoint_directory(parent: str, supervised: bool, worker: str) -> Path:
    """`parent` for a worker that was started by hand, else a directory of its own: launchers that
    run side by side, with a GPU each, share no path either."""
    directory = Path(parent)
    return directory / worker.lower() if supervised else directory


def step_name(num_done: int) -> str:
    return f"step_{num_done}.pt"


def steps_of(path: Path) -> int | None:
    """The N of `step_N.pt`; None for every other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(directory: Path) -> list[Path]:
    """`last.pt` and every `step_N.pt`, by the time of writing: an earlier run may have left higher
    numbers here. `best.pt` is where nobody stopped, so it is not among them."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name == LAST or steps_of(path) is not None:
            with suppress(FileNotFoundError):  # somebody's keep_last has just removed it
                found.append((path.stat().st_mtime_ns, steps_of(path) or 0, path))
    return [path for *_, path in sorted(found, reverse=True)]


def sweep_leftovers(directory: Path) -> None:
    """Remove what writers left that were killed in the middle of a file: nobody holds its lock."""
    for path in directory.glob(".*.tmp") if directory.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    with path.open("r+b") as leftover:
        fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: somebody writes it
        if time.time() - os.fstat(leftover.fileno()).st_mtime > _LEFTOVER_AGE_S:
            path.unlink()
