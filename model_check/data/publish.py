"""Directories that appear whole or not at all: filled beside, synced, renamed into place.

The rename is what makes a cache correct, whatever happens to the lock: two builders at once do the
work twice, and one of them wins. A published file is never changed afterwards.
"""

import errno
import hashlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from model_check.data.manifest import FileEntry
from model_check.data.sharing import share_entry
from model_check.data.sources import BrokenOffError
from model_check.errors import DataError, StorageError
from model_check.utils.files import sync

TMP_PREFIX = ".tmp-"
BAD_PREFIX = ".bad-"
# The whole names, since people point a cache directory at their home, too: `.tmp-<what>-<place>-
# <pid>-<start>-<number>` and `.bad-<when>-<pid>-<entry>` are ours, `.tmp-notes` is not.
_TMP = re.compile(rf"{re.escape(TMP_PREFIX)}\w+-[0-9a-f]{{8}}-\d+-\d+-\w+")
_BAD = re.compile(rf"{re.escape(BAD_PREFIX)}\d{{8}}T\d{{6}}-\d+-.+")
UNFINISHED = "unfinished.json"
"""In a directory that is being filled: how far that has come."""
_FOREIGN_TMP_AGE_S = 24 * 3600
"""Another machine's unfinished directory is taken for dead after so long; ours when it is."""
_RESUMABLE_S = 7 * 24 * 3600
"""So long an unfinished directory waits for somebody who goes on with it."""
_serial = itertools.count()


class PlaceError(StorageError):
    """The directory of the entries cannot be written to, or has too little room."""

    def __init__(self, problem: str, which: str) -> None:
        """`which` directory to take instead: one `that can`, or `with more room`."""
        self.problem = problem
        self.which = which
        cure = f"set data.cache_dir (or DATASET_CACHE_DIR) to a directory {which}"
        super().__init__(f"{problem}; {cure}")


@contextmanager
def beside(root: Path, key_hash: str) -> Iterator[Path]:
    """A new directory to fill; it is gone at the end unless it was published."""
    directory = root / f"{TMP_PREFIX}{key_hash}-{_owner()}-{next(_serial)}"
    try:  # entered before the directory exists: a signal may raise between any two lines
        with storage_errors(root):
            directory.mkdir()
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def going_on(root: Path, key_hash: str) -> Iterator[Path]:
    """Like `beside`, but with what a builder of the same key left that was killed. What is
    unfinished at the end stays for the next one, unless an error says that it would end the same
    (a text that broke off may come back)."""
    directory = root / f"{TMP_PREFIX}{key_hash}-{_owner()}-{next(_serial)}"
    keep = False
    try:
        with storage_errors(root):
            if not _take_over(root, key_hash, directory):
                directory.mkdir()
        keep = True
        yield directory
    except (DataError, StorageError) as error:
        keep = isinstance(error, BrokenOffError)
        raise
    finally:
        if not (keep and (directory / UNFINISHED).exists()):
            shutil.rmtree(directory, ignore_errors=True)


def _take_over(root: Path, key_hash: str, directory: Path) -> bool:
    """By a rename: of two who try, one has it. Another user's files could not be written to."""
    for left in sorted(unfinished(root, key_hash), key=_when_saved, reverse=True):
        with suppress(OSError):
            ours = left.stat().st_uid == os.geteuid()
            if ours and is_dead(left) and (left / UNFINISHED).exists():
                left.rename(directory)
                return True
    return False


def _when_saved(directory: Path) -> float:
    with suppress(OSError):
        return (directory / UNFINISHED).stat().st_mtime
    return 0.0


def write_synced(path: Path, data: bytes) -> FileEntry:
    """Write a whole new file of a directory that is being filled, fsync it. Raises StorageError."""
    with storage_errors(path.parent.parent):
        path.write_bytes(data)
        sync(path)
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def publish(filled: Path, final: Path) -> bool:
    """Make `filled`, its files synced, appear as `final`; False when somebody else was first."""
    with storage_errors(final.parent):
        share_entry(filled.parent, filled)
        sync(filled)
        try:
            filled.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync(final.parent)
    return True


def set_aside(root: Path, entry: Path) -> Path:
    """Move a bad entry out of the way, kept for whoever wants to know what happened to it; gone
    already: somebody else does the same."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    place = root / f"{BAD_PREFIX}{stamp}-{os.getpid()}-{entry.name}"
    with storage_errors(root), suppress(FileNotFoundError):
        entry.rename(place)
    return place


def forget(root: Path, key_hash: str) -> None:
    """Remove what dead builders left of a store that is finished."""
    for left in unfinished(root, key_hash):
        with suppress(OSError):
            if is_dead(left):
                shutil.rmtree(left, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what builders left that did not live to do it, and that nobody will go on with."""
    for directory in unfinished(root):
        with suppress(OSError):  # somebody else sweeps too
            if is_dead(directory) and time.time() - _when_saved(directory) > _RESUMABLE_S:
                shutil.rmtree(directory, ignore_errors=True)


def unfinished(root: Path, key_hash: str = "*") -> list[Path]:
    """Directories that were, or are, filled in `root`: of one key, or all."""
    found = root.glob(f"{TMP_PREFIX}{key_hash}-*")
    return sorted(path for path in found if _TMP.fullmatch(path.name))


def unfinished_bytes(root: Path, key_hash: str) -> int:
    """What lies on the disk already of a store that is not finished."""
    total = 0
    for directory in unfinished(root, key_hash):
        with suppress(OSError):  # its builder works on it
            total += sum(file.stat().st_size for file in directory.iterdir())
    return total


def aside(root: Path) -> list[Path]:
    """What was set aside in `root`."""
    return sorted(path for path in root.glob(f"{BAD_PREFIX}*") if _BAD.fullmatch(path.name))


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Any OSError inside becomes a PlaceError that names the directory and the cure."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text, which = f"the disk is full ({_mib(free_bytes(root))} free)", "with more room"
        else:
            text, which = f"cannot be written: {error.strerror or error}", "that can"
        raise PlaceError(f"{root}: {text}", which) from error


def check_room(root: Path, needed: int) -> None:
    """Raises PlaceError when `needed` bytes will not fit: before the work, not after it."""
    free = free_bytes(root)
    if needed > free:
        text = f"{root}: needs about {_mib(needed)}, has {_mib(free)} free"
        raise PlaceError(text, "with more room")


def free_bytes(root: Path) -> int:
    """Free for this user on the file system of `root` (or of its nearest parent that exists)."""
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    st = os.statvfs(existing)
    return st.f_bavail * st.f_frsize


@cache
def place_id() -> str:
    """Names this boot of this machine and this PID namespace: where a PID means a process."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; None: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _owner() -> str:
    return f"{place_id()}-{os.getpid()}-{start_time(os.getpid())}"


def is_dead(directory: Path) -> bool:
    """Whether the builder that a directory's name tells of is gone. Raises OSError."""
    match directory.name.removeprefix(TMP_PREFIX).split("-"):
        case [_, place, pid, started, *_] if place == place_id() and pid.isdigit():
            return start_time(int(pid)) != started
        case _:
            return time.time() - directory.stat().st_mtime > _FOREIGN_TMP_AGE_S


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
