"""Entries that appear whole or not at all: filled in a staging directory, synced, renamed into
place.

The rename alone makes a cache correct, whatever happens to the lock: two builders at once do the
work twice, and the first rename wins. A published file is never changed afterwards.
"""

import errno
import hashlib
import itertools
import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from model_check.data.read.manifest import FileEntry
from model_check.data.read.sharing import hold_cache, share_entry
from model_check.errors import DataError, StorageError
from model_check.utils.held import OTHERS_WRITE, HeldDirectory

TMP_PREFIX = ".tmp-"
BAD_PREFIX = ".bad-"
# Whole names, since a cache directory may be somebody's home: `.tmp-<key>-<place>-<pid>-<start>-
# <number>` and `.bad-<when>-<pid>-<entry>` are ours, `.tmp-notes` is not.
_TMP = re.compile(rf"{re.escape(TMP_PREFIX)}\w+-[0-9a-f]{{8}}-\d+-\d+-\w+")
_BAD = re.compile(rf"{re.escape(BAD_PREFIX)}\d{{8}}T\d{{6}}-\d+-.+")
UNFINISHED = "unfinished.json"
"""The note in a staging directory that says how much of it is filled."""
_FOREIGN_TMP_AGE_S = 24 * 3600
"""After so long another machine's builder counts as dead. Of ours we know."""
_RESUMABLE_S = 7 * 24 * 3600
"""So long an unfinished directory is kept for a builder that continues it."""
_NOBODY_ELSE_WRITES = 0o755
_serial = itertools.count()


class BrokenOffError(DataError):
    """The rest of the text cannot be read now. The work on the text before it is worth keeping."""


class PlaceError(StorageError):
    """The directory of the entries cannot be written to, or has too little room."""

    def __init__(self, path: Path, reason: str, *, full: bool) -> None:
        self.path = path
        self.reason = reason
        self.full = full
        super().__init__(self.with_cure("data.cache_dir (or DATASET_CACHE_DIR)"))

    def with_cure(self, setting: str) -> str:
        """The message, where `setting` chose the directory."""
        other = "with more room" if self.full else "that can be written"
        return f"{self.path}: {self.reason}; set {setting} to a directory {other}"


@contextmanager
def staging(root: Path, key_hash: str, *, resume: bool = False) -> Iterator[HeldDirectory]:
    """A directory to fill, removed at the end unless it was published.

    With `resume` it is one that a killed builder of the same key left, if there is one. What is
    unfinished at the end then stays for the next builder, unless the error would come again: of the
    errors of text and disk only BrokenOffError may not. Raises StorageError.
    """
    with storage_errors(root):
        cache = hold_cache(root)
    with cache, _staging_directory(cache, key_hash, resume) as directory:
        keep = resume
        try:
            yield directory
        except (DataError, StorageError) as error:
            keep = resume and isinstance(error, BrokenOffError)
            raise
        finally:
            # Its name is gone if it was published, or leads elsewhere: then nothing is removed.
            if not (keep and directory.has(UNFINISHED)):
                with suppress(OSError):
                    cache.remove_held(directory)


def _staging_directory(cache: HeldDirectory, key_hash: str, resume: bool) -> HeldDirectory:
    name = _new_name(key_hash)
    with storage_errors(cache.path):
        directory = _taken_over(cache, key_hash, name) if resume else None
        return directory or _made(cache, name)


def _made(cache: HeldDirectory, name: str) -> HeldDirectory:
    """A new directory in which no other user can make a link."""
    cache.make_directory(name, _NOBODY_ELSE_WRITES)
    directory = cache.directory(name)
    try:
        if not directory.is_ours() or directory.names():
            raise PermissionError(errno.EPERM, f"another user replaced {name}")
    except BaseException:
        directory.close()
        raise
    return directory


def _taken_over(cache: HeldDirectory, key_hash: str, name: str) -> HeldDirectory | None:
    """The newest one that dead builders left and that can be continued, under a new name."""
    left = sorted(unfinished(cache, key_hash), key=lambda name: _saved(cache, name), reverse=True)
    for old in left:
        with suppress(OSError):
            directory = _claimed(cache, old, name) if is_dead(cache, old) else None
            if directory is not None:
                return directory
    return None


def _claimed(cache: HeldDirectory, old: str, name: str) -> HeldDirectory | None:
    """By a rename: of two builders that try, one gets it."""
    with cache.directory(old) as left:
        # Only our own, to which nobody else could write.
        others_write = left.status().st_mode & OTHERS_WRITE
        if others_write or not left.has(UNFINISHED) or not left.is_ours():
            return None
        cache.rename(old, cache, name)
        directory = cache.directory(name)
        if os.path.samestat(directory.status(), left.status()):
            return directory
    directory.close()
    return None


def _saved(cache: HeldDirectory, name: str) -> float:
    """When its last note was written; 0: it has none."""
    with suppress(OSError), cache.directory(name) as directory:
        return directory.lstat(UNFINISHED).st_mtime
    return 0.0


def write_synced(directory: HeldDirectory, name: str, data: bytes) -> FileEntry:
    """Write and fsync a whole new file of a staging directory. Raises StorageError."""
    with storage_errors(directory.path.parent), directory.create(name) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def publish(filled: HeldDirectory, final: Path) -> bool:
    """Make `filled`, whose files are synced, appear as `final`. False: another builder was first.
    Raises StorageError."""
    root, name = filled.path.parent, filled.path.name
    with storage_errors(root), hold_cache(root) as cache, _parent(cache, final) as place:
        share_entry(cache, filled)
        filled.sync()
        try:
            cache.rename(name, place, final.name)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            if error.errno != errno.ENOENT:
                raise
        if not place.leads_to(final.name, filled.status()):
            raise PermissionError(errno.EPERM, f"another user replaced {name}")
        place.sync()
    return True


def set_aside(root: Path, entry: Path) -> Path:
    """Move a bad entry away, and keep it to find out what happened to it. It may be gone: another
    process does the same. Raises StorageError."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    name = f"{BAD_PREFIX}{stamp}-{os.getpid()}-{entry.name}"
    with (
        storage_errors(root),
        suppress(FileNotFoundError),
        hold_cache(root) as cache,
        _parent(cache, entry) as place,
    ):
        place.rename(entry.name, cache, name)
    return root / name


def take_away(root: Path, key_hash: str, entry: Path) -> bool:
    """Remove an entry. False: it was gone already. Raises StorageError."""
    if entry.name.startswith((TMP_PREFIX, BAD_PREFIX)):
        # Hidden already: what cannot be removed is not wrapped once more with every attempt.
        with storage_errors(root), hold_cache(root) as cache:
            return _remove(cache, entry.name)
    # Hidden first, in one step, so that nobody opens half of it. It goes into a directory of ours:
    # the kernel refuses that for an entry that we may not remove, which then stays in its place.
    with staging(root, key_hash) as ours, storage_errors(root), hold_cache(root) as cache:
        with suppress(FileNotFoundError), _parent(cache, entry) as place:
            place.rename(entry.name, ours, "entry")
        return _remove(ours, "entry")


def _remove(place: HeldDirectory, name: str) -> bool:
    try:
        place.remove(name)
    except FileNotFoundError:
        return False
    return True


def is_of_another_user(root: Path, entry: Path) -> bool:
    with suppress(OSError), hold_cache(root) as cache, _parent(cache, entry) as place:
        return place.lstat(entry.name).st_uid != os.geteuid()
    return False


def _parent(cache: HeldDirectory, entry: Path) -> HeldDirectory:
    """The directory that an entry lies in: the cache itself, or one in it."""
    return cache.directory(*entry.parent.relative_to(cache.path).parts)


def forget(root: Path, key_hash: str) -> None:
    """Remove all that dead builders of one key left."""
    with suppress(OSError), hold_cache(root) as cache:
        _remove_dead(cache, unfinished(cache, key_hash))


def sweep(root: Path) -> None:
    """Remove what dead builders left and nobody continued for a week. Raises OSError."""
    oldest = time.time() - _RESUMABLE_S
    with hold_cache(root) as cache:
        _remove_dead(cache, [name for name in unfinished(cache) if _saved(cache, name) < oldest])


def _remove_dead(cache: HeldDirectory, names: list[str]) -> None:
    for name in names:
        # Another process may sweep at the same time.
        with suppress(OSError):
            if is_dead(cache, name):
                cache.remove(name)


def unfinished(cache: HeldDirectory, key_hash: str = "") -> list[str]:
    """Names of the staging directories in a cache, of living and dead builders: of one key, or
    all."""
    start = f"{TMP_PREFIX}{key_hash}-" if key_hash else TMP_PREFIX
    return [name for name in cache.names() if name.startswith(start) and _TMP.fullmatch(name)]


def names_set_aside(cache: HeldDirectory) -> list[str]:
    return [name for name in cache.names() if _BAD.fullmatch(name)]


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Any OSError inside becomes a PlaceError."""
    try:
        yield
    except OSError as error:
        reason = _why_no_room(error, root)
        why = reason or f"cannot be written: {error.strerror or error}"
        raise PlaceError(root, why, full=reason is not None) from error


def _why_no_room(error: OSError, root: Path) -> str | None:
    """None: there is some."""
    match error.errno:
        case errno.EDQUOT:
            return "your quota on its disk is used up"
        case errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            return f"no file may have more than {_mib(most)} (ulimit -f)"
        case errno.ENOSPC if _statvfs(root).f_files and not _statvfs(root).f_favail:
            return "its disk has no room for another file (no inodes are left)"
        case errno.ENOSPC:
            return f"the disk is full ({_mib(free_bytes(root))} free)"
    return None


def check_room(root: Path, needed: int) -> None:
    """Raises PlaceError when `needed` bytes will not fit: before the work, not after it."""
    free = free_bytes(root)
    if needed > free:
        raise PlaceError(root, f"needs about {_mib(needed)}, has {_mib(free)} free", full=True)


def free_bytes(root: Path) -> int:
    """Free for this user on the file system of `root`, or of its nearest parent that exists."""
    st = _statvfs(root)
    return st.f_bavail * st.f_frsize


def _statvfs(root: Path) -> os.statvfs_result:
    """Of the file system of `root`, or of its nearest parent that exists."""
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    return os.statvfs(existing)


@cache
def place_id() -> str:
    """Identifies this boot of this machine and this PID namespace, in which a PID is unique."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; None: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _new_name(key_hash: str) -> str:
    """Of a staging directory of this process."""
    pid = os.getpid()
    return f"{TMP_PREFIX}{key_hash}-{place_id()}-{pid}-{start_time(pid)}-{next(_serial)}"


def is_dead(cache: HeldDirectory, name: str) -> bool:
    """Whether the builder in a staging directory's name is gone. Raises OSError."""
    match name.removeprefix(TMP_PREFIX).split("-"):
        case [_, place, pid, started, *_] if place == place_id() and pid.isdigit():
            return start_time(int(pid)) != started
        case _:
            return time.time() - cache.lstat(name).st_mtime > _FOREIGN_TMP_AGE_S


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
