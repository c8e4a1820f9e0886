"""The names of checkpoints: `last.pt` and `step_4.pt` are files; `last` and `step_4` are sharded,
directories that count once they hold a manifest."""

import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from model_check.utils.files import read_whole

LAST = "last.pt"
BEST = "best.pt"
ERROR = "error.pt"
MANIFEST = "manifest.json"
PENDING = f"{MANIFEST}.pending"
"""The manifest of an earlier run's save whose files have not moved yet."""
COMMON = "common.pt"
ATTEMPT = r"^[0-9a-f]{16}\Z"
"""The directory of the files of one save, in that of a sharded checkpoint."""
LONGEST = 256 << 20
"""Bytes of a manifest: a larger one would only fill our memory."""
IN_USE = ".in_use"
"""Locked by the run that is in a directory of checkpoints, and written when it comes; it says which
one that is, or was."""
NONE_THERE = "holds no last.pt or step_N.pt, nor a sharded last or step_N"
_NAME = re.compile(
    r"(?P<name>last|best|step_(?P<step>0|[1-9]\d*))(?P<earlier>\.earlier\d*)?(\.pt)?"
)


def steps_of(path: Path) -> int | None:
    """The N of `step_N.pt` and `step_N`; None for every other name."""
    match = _NAME.fullmatch(path.name)
    return int(match["step"]) if match and match["step"] and not match["earlier"] else None


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


def paths_in(directory: Path) -> list[Path]:
    """`last.pt` and every `step_N.pt`, sharded or not, and those kept from earlier runs
    (`last.earlier.pt`). `best.pt` is not among them: no run ended there. Raises OSError where the
    directory cannot be listed."""
    paths = directory.iterdir() if os.path.isdir(directory) else ()
    named = [path for path in paths if is_named(path) and not path.name.startswith("best")]
    return [path for path in named if path.suffix == ".pt" or is_sharded(path)]


def is_named(path: Path) -> bool:
    """Whether it has the name of a checkpoint, sharded or not, kept from an earlier run or not."""
    return _NAME.fullmatch(path.name) is not None


def is_earlier(path: Path) -> bool:
    """Whether it was kept from an earlier run."""
    match = _NAME.fullmatch(path.name)
    return match is not None and match["earlier"] is not None


def content_of(path: Path) -> str:
    """A name of what is in a checkpoint, by the checksums that it holds: of two files with one name
    it tells which is which. Empty where that cannot be told: to read it will say why."""
    from model_check.utils.archive import DAMAGE, checksums_of  # 4 ms, which few starts need

    with suppress(OSError, *DAMAGE):
        if path.is_dir():
            return f"{zlib.crc32(read_whole(path / MANIFEST, LONGEST)):08x}"
        return f"{checksums_of(path):08x}"
    return ""
