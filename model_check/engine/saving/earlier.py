"""Keeps what an earlier run left under a name that this run needs: `last.pt` becomes
`last.earlier.pt`, `last` becomes `last.earlier`. An older one of that name is replaced if its run
had the same settings; otherwise the next number is taken (`last.earlier2.pt`).

The new checkpoint is whole before the old one moves, so a full disk or a kill at any moment leaves
one of the two under the name.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model_check.config.resume import acting_settings
from model_check.engine.saving.lineage import header_of
from model_check.engine.sharded.manifest import read_manifest, remove_empty, remove_unfinished
from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import (
    ATTEMPT,
    LONGEST,
    MANIFEST,
    PENDING,
    is_earlier,
    is_sharded,
)
from model_check.utils.held import HeldDirectory, hold_unlinked


def keep_file(path: Path) -> Path | None:
    """Give the file at `path` the name of an earlier run's, which an older one loses; `path` is
    about to be replaced. Returns that name; None: there is no such file. Raises OSError."""
    with hold_unlinked(path.parent) as directory:
        if path.name not in directory.names() or _is_directory(path):
            return None
        earlier = next(name for name in _names_for(path) if _gives_way(name, path))
        with suppress(FileNotFoundError):
            directory.unlink(earlier.name)
        try:
            directory.link(path.name, earlier.name)
        except OSError:  # a file system without hard links, or another user's file
            directory.rename(path.name, directory, earlier.name)
    return earlier


@contextmanager
def keeping_shards(path: Path, attempt: str) -> Iterator[Path | None]:
    """Around the replacement of the manifest in `path` by that of the save in `path/attempt`: the
    save that was there moves to a directory of its own, which is yielded; None: none was there.
    After a kill amid this `finish_moves` does the rest. Raises OSError."""
    if not is_sharded(path):
        yield None
        return
    earlier = _free_directory(path)
    with hold_unlinked(path) as old, hold_unlinked(earlier, make=True) as new:
        try:
            new.replace(PENDING, old.read(MANIFEST, LONGEST))
            yield earlier
        except BaseException:
            with suppress(OSError, CheckpointError):  # the manifest may be replaced all the same
                _finish_move(earlier)
            with suppress(OSError):
                os.rmdir(earlier)  # if nothing has come into it
            raise
        for name in old.names():
            if re.fullmatch(ATTEMPT, name) and name != attempt:
                old.rename(name, new, name)
        _publish(new)


def move_closed(path: Path) -> Path | None:
    """Rename a sharded checkpoint in whose directory nothing can be written, another user's for
    one. None: something can. Raises OSError."""
    if not path.is_dir() or os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return None
    earlier = _free_directory(path)
    with hold_unlinked(path.parent) as directory:
        directory.rename(path.name, directory, earlier.name)
    return earlier


def finish_moves(directory: Path) -> None:
    """Finish each move in a directory of checkpoints that a kill has cut short."""
    for earlier in directory.iterdir() if directory.is_dir() else ():
        if is_earlier(earlier) and os.path.exists(earlier / PENDING):
            with suppress(OSError, CheckpointError):  # a damaged manifest: all stays as it is
                _finish_move(earlier)


def _finish_move(earlier: Path) -> None:
    """Raises OSError, CheckpointError."""
    path = earlier.with_name(earlier.name.partition(".")[0])
    attempt = read_manifest(earlier, PENDING).directory
    with hold_unlinked(path) as old, hold_unlinked(earlier) as new:
        if is_sharded(path) and read_manifest(path).directory == attempt:
            new.unlink(PENDING)  # its manifest was not replaced
            os.rmdir(earlier)
            return
        with suppress(FileNotFoundError):  # it has moved
            old.rename(attempt, new, attempt)
        _publish(new)


def _publish(earlier: HeldDirectory) -> None:
    """Raises OSError."""
    try:
        earlier.sync()
    finally:  # the files are here, whether the disk tells or not
        earlier.rename(PENDING, earlier, MANIFEST)
    earlier.sync()


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


def _free_directory(path: Path) -> Path:
    """The first of the names that is free; an older checkpoint that gives way is removed. A
    directory with files that are not ours keeps its name, and so does another user's."""
    for earlier in _names_for(path):
        if is_sharded(earlier) and _gives_way(earlier, path):
            with suppress(PermissionError):
                remove_checkpoint(earlier)
        if not os.path.lexists(earlier):
            return earlier
    raise AssertionError("_names_for ends with an error")


def _names_for(path: Path) -> Iterator[Path]:
    for number in ("", *map(str, range(2, 1_000))):
        yield path.with_name(f"{path.stem}.earlier{number}{path.suffix}")
    raise FileExistsError(errno.EEXIST, "999 earlier ones are there", str(path))


def _gives_way(earlier: Path, path: Path) -> bool:
    """Whether nothing is there, or what a run with the settings of that in `path` has left."""
    if not os.path.lexists(earlier):
        return True
    one, other = header_of(earlier), header_of(path)
    if one is None or other is None or is_sharded(earlier) != is_sharded(path):
        return False
    return acting_settings(one.settings) == acting_settings(other.settings)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
