"""The checkpoints of one directory: their names, which is the newest, which may be removed."""

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from model_check.utils.held import hold_unlinked

LAST = "last.pt"
BEST = "best.pt"
ERROR = "error.pt"
_STEP = re.compile(r"step_(0|[1-9]\d*)\.pt")
_LEFTOVER = re.compile(r"\.(last|best|error|(nan_grad_)?step_\d+)\.pt\.\w+\.tmp")
_WORKER = re.compile(r"[cg]pu\d+[\w.]*")
"""`gpu3`, of a MIG slice `gpu3.1`."""
_LEFTOVER_AGE_S = 10.0
"""A younger file may belong to a writer that has not locked it yet."""


def step_name(num_done: int) -> str:
    return f"step_{num_done}.pt"


def steps_of(path: Path) -> int | None:
    """The N of `step_N.pt`; None for every other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(directory: Path) -> list[Path]:
    """`last.pt` and every `step_N.pt`, by the time of writing: an earlier run may have left higher
    numbers here. `best.pt` is not among them: no run ended there."""
    return [path for *_, path in sorted(_written(directory), reverse=True)]


def directories_beside(directory: Path, worker: str, before: float) -> list[Path]:
    """Directories of other workers with checkpoints from `before` (seconds since the epoch). Later
    checkpoints may be of this run: its workers do not wait for each other."""
    parent = directory.parent if directory.name == worker.lower() else directory
    others = [
        path
        for path in (parent.iterdir() if parent.is_dir() else ())
        if _WORKER.fullmatch(path.name) and path.name != directory.name and path.is_dir()
    ]
    return sorted(path for path in others if any(ns < before * 1e9 for ns, *_ in _written(path)))


def keep_earlier(path: Path) -> Path | None:
    """Rename the file of an earlier run: `last.pt` becomes `last.earlier.pt`, and replaces an older
    one of that name. None: there was no such file. Raises OSError."""
    earlier = path.with_name(f"{path.stem}.earlier{path.suffix}")
    try:
        with hold_unlinked(path.parent) as directory:
            directory.rename(path.name, directory, earlier.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return earlier


def _written(directory: Path) -> list[tuple[int, int, Path]]:
    """(time of writing, step, file) of each checkpoint that a run can resume."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name == LAST or steps_of(path) is not None:
            with suppress(FileNotFoundError):  # another process has just removed it (keep_last)
                found.append((_written_ns(path), steps_of(path) or 0, path))
    return found


def _written_ns(path: Path) -> int:
    """Time of writing; of a broken link its own, so that the link is reported and not skipped in
    silence. Raises FileNotFoundError where there is no link either."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return path.lstat().st_mtime_ns


def sweep_leftovers(directory: Path) -> None:
    """Remove the partial files of writers that were killed: no process holds their locks."""
    for path in directory.glob(".*.tmp") if directory.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    with hold_unlinked(path.parent) as directory, directory.append(path.name) as leftover:
        fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: a process writes it
        if time.time() - os.fstat(leftover.fileno()).st_mtime > _LEFTOVER_AGE_S:
            directory.unlink(path.name)
