"""The names of checkpoints: `last.pt` and `step_4.pt` are files; `last` and `step_4` are sharded,
directories that count once they hold a manifest."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from model_check.utils.files import read_whole

LAST = "last.pt"
BEST = "best.pt"
ERROR = "error.pt"
MANIFEST = "manifest.json"
COMMON = "common.pt"
ATTEMPT = r"^[0-9a-f]{16}\Z"
"""The directory of the files of one save, in that of a sharded checkpoint."""
LONGEST = 256 << 20
"""Bytes of a manifest: a larger one would only fill our memory."""
IN_USE = ".in_use"
"""Locked by the run that is in a directory of checkpoints, and written when it comes; it says which
one that is, or was."""
NONE_THERE = "holds no last.pt or step_N.pt, nor a sharded last or step_N"
_STEP = re.compile(r"step_(0|[1-9]\d*)(\.pt)?")


class Written(NamedTuple):
    """A checkpoint that a run can go on from; the greatest is the newest."""

    ns: int
    """When it was written, since the epoch."""
    step: int
    """Of `last` 0."""
    path: Path


def steps_of(path: Path) -> int | None:
    """The N of `step_N.pt` and `step_N`; None for every other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def sharded_name(name: str) -> str:
    """`step_4.pt` -> `step_4`"""
    return name.removesuffix(".pt")


def is_sharded(path: Path) -> bool:
    """Whether a sharded save was finished there. A directory that we may not look into counts: who
    reads it says so, and no newer checkpoint is passed over in silence."""
    try:
        return stat.S_ISREG(os.stat(path / MANIFEST).st_mode)
    except PermissionError:
        return os.path.isdir(path)
    except OSError:
        return False


def was_begun(path: Path) -> bool:
    """Whether a save left files in the directory `path`, and no manifest."""
    with suppress(OSError):
        return not is_sharded(path) and any(
            re.fullmatch(ATTEMPT, name) for name in os.listdir(path)
        )
    return False


def common_file(path: Path) -> Path:
    """What a sharded checkpoint holds beside weights and moments. Raises OSError, ValueError."""
    try:
        found = msgspec.json.decode(read_whole(path / MANIFEST, LONGEST), type=_Place)
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / MANIFEST}: {error}") from error
    return path / found.directory / COMMON


class _Place(msgspec.Struct):
    directory: Annotated[str, msgspec.Meta(pattern=ATTEMPT)]


def written_ns(path: Path) -> int:
    """When the checkpoint was written; a broken link: when that was made, so that it is reported
    and not skipped in silence. Raises FileNotFoundError where nothing is there."""
    try:
        return (path / MANIFEST if is_sharded(path) else path).stat().st_mtime_ns
    except OSError:
        return path.lstat().st_mtime_ns


def checkpoints_in(directory: Path) -> Iterator[Written]:
    """`last.pt` and every `step_N.pt`, sharded or not. `best.pt` is not among them: no run ended
    there. Raises OSError where the directory cannot be listed."""
    for path in directory.iterdir() if os.path.isdir(directory) else ():
        if path.name not in (LAST, sharded_name(LAST)) and steps_of(path) is None:
            continue
        if path.suffix or is_sharded(path):
            with suppress(FileNotFoundError):  # another process has just removed it (keep_last)
                yield Written(written_ns(path), steps_of(path) or 0, path)
