"""The names of checkpoints that a run writes, and what is left of saves that were cut short."""

import fcntl
import re
from contextlib import suppress
from pathlib import Path

from model_check.engine.saving.earlier import finish_moves
from model_check.engine.sharded.manifest import read_manifest, remove_empty
from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import ATTEMPT, MANIFEST, is_named, was_begun
from model_check.utils.held import hold_unlinked

_LEFTOVER = re.compile(r"\.(last|best|error|(nan_grad_)?step_\d+)\.pt\.\w+\.tmp")
_MANIFEST_LEFTOVER = re.compile(r"\.manifest\.json(\.pending)?\.\w+\.tmp")


def step_name(num_done: int) -> str:
    return f"step_{num_done}.pt"


def unfinished(directory: Path) -> list[Path]:
    """Sharded checkpoints without a manifest: their saves were cut short."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in paths if is_named(path) and was_begun(path))


def sweep_leftovers(directory: Path) -> None:
    """Finish a move that a killed writer began, and remove its partial files and the directories of
    its sharded saves. This run has claimed the directory."""
    finish_moves(directory)
    for path in directory.iterdir() if directory.is_dir() else ():
        with suppress(OSError, CheckpointError):  # a damaged manifest: all stays as it is
            if _LEFTOVER.fullmatch(path.name):
                _remove_if_dead(path)
            elif is_named(path) and path.is_dir():
                _remove_dead_attempts(path)


def _remove_dead_attempts(path: Path) -> None:
    with hold_unlinked(path.parent) as parent, parent.directory(path.name) as held:
        manifest = None if not held.has(MANIFEST) else read_manifest(path)
        for name in held.names():
            if _MANIFEST_LEFTOVER.fullmatch(name):
                held.unlink(name)
            if re.fullmatch(ATTEMPT, name) and (manifest is None or name != manifest.directory):
                with suppress(OSError), held.directory(name) as attempt:
                    _lock(attempt.descriptor)
                    held.remove_held(attempt)
        remove_empty(parent, path.name)


def _remove_if_dead(path: Path) -> None:
    with hold_unlinked(path.parent) as directory, directory.append(path.name) as leftover:
        _lock(leftover.fileno())
        directory.unlink(path.name)


def _lock(descriptor: int) -> None:
    """Raises OSError while a process writes it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
