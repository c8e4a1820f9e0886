"""Directories that appear whole or not at all: filled beside, synced, renamed into place.

The rename is what makes a cache correct, whatever happens to the lock: two builders at once do the
work twice, and one of them wins. A published file is never changed afterwards.
"""

import errno
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from model_check.errors import StorageError
from model_check.utils.files import sync

TMP_PREFIX = ".tmp-"
BAD_PREFIX = ".bad-"
_FOREIGN_TMP_AGE_S = 24 * 3600
"""Another machine's unfinished directory is taken for dead after so long; ours when it is."""
_serial = itertools.count()
_CURE = "set data.cache_dir (or DATASET_CACHE_DIR) to a directory"


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


def publish(filled: Path, final: Path) -> bool:
    """Make `filled`, its files synced, appear as `final`; False when somebody else was first."""
    with storage_errors(final.parent):
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
    """Move a bad entry out of the way, kept for whoever wants to know what happened to it."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    aside = root / f"{BAD_PREFIX}{stamp}-{os.getpid()}-{entry.name}"
    with storage_errors(root):
        entry.rename(aside)
    return aside


def sweep(root: Path) -> None:
    """Remove what builders left that did not live to do it."""
    for directory in root.glob(f"{TMP_PREFIX}*"):
        with suppress(OSError):  # somebody else sweeps too
            if _is_dead(directory):
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Any OSError inside becomes a StorageError that names the directory and the cure."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"the disk is full ({_mib(free_bytes(root))} free); {_CURE} with more room"
        else:
            text = f"cannot be written: {error.strerror or error}; {_CURE} that can"
        raise StorageError(f"{root}: {text}") from error


def check_room(root: Path, needed: int) -> None:
    """Raises StorageError when `needed` bytes will not fit: before the work, not after it."""
    free = free_bytes(root)
    if needed > free:
        raise StorageError(
            f"{root}: needs about {_mib(needed)}, has {_mib(free)} free; {_CURE} with more room"
        )


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


def _is_dead(directory: Path) -> bool:
    match directory.name.removeprefix(TMP_PREFIX).split("-"):
        case [_, place, pid, started, *_] if place == place_id() and pid.isdigit():
            return start_time(int(pid)) != started
        case _:
            return time.time() - directory.stat().st_mtime > _FOREIGN_TMP_AGE_S


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
