"""The checkpoints of one directory: their names, which is the newest, which may be removed. One is
a file, `step_4.pt`, or sharded, a directory `step_4` that holds a manifest."""

import errno
import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from model_check.engine.sharded.manifest import read_manifest, remove_empty, remove_unfinished
from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import (
    ATTEMPT,
    MANIFEST,
    checkpoints_in,
    is_sharded,
    was_begun,
)
from model_check.utils.held import HeldDirectory, hold_unlinked

_SHARDED = re.compile(r"(last|best|step_(0|[1-9]\d*))(\.earlier\d*)?")
_LEFTOVER = re.compile(r"\.(last|best|error|(nan_grad_)?step_\d+)\.pt\.\w+\.tmp")
_WORKER = re.compile(r"[cg]pu\d+[\w.]*")
"""`gpu3`, of a MIG slice `gpu3.1`."""
_LEFTOVER_AGE_S = 10.0
"""A younger file may belong to a writer that has not locked it yet."""


def step_name(num_done: int) -> str:
    return f"step_{num_done}.pt"


def newest_first(directory: Path) -> list[Path]:
    """`last.pt` and every `step_N.pt`, sharded or not, by the time of writing: an earlier run may
    have left higher numbers here. `best.pt` is not among them: no run ended there."""
    return [written.path for written in sorted(checkpoints_in(directory), reverse=True)]


def unfinished(directory: Path) -> list[Path]:
    """Sharded checkpoints without a manifest: their saves were cut short."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(p for p in paths if _SHARDED.fullmatch(p.name) and was_begun(p))


def remove_checkpoint(path: Path) -> None:
    """Raises OSError. Of a sharded one the manifest goes first: what is left then counts for
    nothing; what is not ours in the directory stays, and so does the directory."""
    if not path.is_dir():
        path.unlink()
        return
    with hold_unlinked(path.parent) as parent, parent.directory(path.name) as held:
        with suppress(FileNotFoundError):
            held.unlink(MANIFEST)
        held.sync()
        remove_unfinished(held, keep=None)
        remove_empty(parent, path.name)


def directories_beside(directory: Path, worker: str, before: float) -> list[Path]:
    """Directories of other workers with checkpoints from `before` (seconds since the epoch). Later
    checkpoints may be of this run: its workers do not wait for each other."""
    parent = directory.parent if directory.name == worker.lower() else directory
    others = [
        path
        for path in (parent.iterdir() if parent.is_dir() else ())
        if _WORKER.fullmatch(path.name) and path.name != directory.name and path.is_dir()
    ]
    return sorted(path for path in others if any(w.ns < before * 1e9 for w in checkpoints_in(path)))


def keep_earlier(path: Path) -> Path | None:
    """Rename the file of an earlier run: `last.pt` becomes `last.earlier.pt`, `last` becomes
    `last.earlier`, and replaces an older one of that name. None: there was no such file, or a save
    that was cut short. Raises OSError."""
    if os.path.isdir(path) and not is_sharded(path):
        return None
    try:
        earlier = _place_for_earlier(path)
        with hold_unlinked(path.parent) as directory:
            directory.rename(path.name, directory, earlier.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return earlier


def _place_for_earlier(path: Path) -> Path:
    """An older one of ours gives way. What else has the name stays (a file where this is a
    directory, a directory with files that are not ours), and the next number is taken."""
    for number in ("", *map(str, range(2, 1_000))):
        earlier = path.with_name(f"{path.stem}.earlier{number}{path.suffix}")
        if is_sharded(path) and is_sharded(earlier):
            with suppress(PermissionError):  # another user's
                remove_checkpoint(earlier)
        is_directory = earlier.is_dir() and not earlier.is_symlink()
        if not os.path.lexists(earlier) or not (is_directory or path.is_dir()):
            return earlier
    raise FileExistsError(errno.EEXIST, "999 earlier ones are there", str(path))


def sweep_leftovers(directory: Path) -> None:
    """Remove the partial files of writers that were killed: no process holds their locks. And the
    directories of sharded saves that were, or that newer ones have replaced."""
    for path in directory.glob(".*.tmp") if directory.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):
                _remove_if_dead(path)
    for path in directory.iterdir() if directory.is_dir() else ():
        if _SHARDED.fullmatch(path.name):
            with suppress(OSError, CheckpointError):  # a damaged manifest: all stays as it is
                _remove_dead_attempts(path)


def _remove_dead_attempts(path: Path) -> None:
    with hold_unlinked(path.parent) as parent, parent.directory(path.name) as held:
        manifest = None if not held.has(MANIFEST) else read_manifest(path)
        for name in held.names():
            if re.fullmatch(ATTEMPT, name) and (manifest is None or name != manifest.directory):
                with suppress(OSError), held.directory(name) as attempt:
                    _remove_attempt_if_dead(held, attempt)
        remove_empty(parent, path.name)


def _remove_attempt_if_dead(held: HeldDirectory, attempt: HeldDirectory) -> None:
    fcntl.flock(attempt.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: a job writes it
    if time.time() - attempt.status().st_mtime > _LEFTOVER_AGE_S:
        held.remove_held(attempt)


def _remove_if_dead(path: Path) -> None:
    with hold_unlinked(path.parent) as directory, directory.append(path.name) as leftover:
        fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: a process writes it
        if time.time() - os.fstat(leftover.fileno()).st_mtime > _LEFTOVER_AGE_S:
            directory.unlink(path.name)
