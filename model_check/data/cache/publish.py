"""Directories that appear whole or not at all: filled beside, synced, renamed into place.

The rename is what makes a cache correct, whatever happens to the lock: two builders at once do the
work twice, and one of them wins. A published file is never changed afterwards.
"""

import errno
import hashlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from model_check.data.read.manifest import FileEntry
from model_check.data.read.sharing import hold_cache, is_ours, share_entry
from model_check.errors import DataError, StorageError
from model_check.utils.held import OTHERS_WRITE, HeldDirectory

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
_NOBODY_ELSE_WRITES = 0o755
_serial = itertools.count()


class BrokenOffError(DataError):
    """The rest of the text cannot be had now. What was made of the text before is worth keeping."""


class PlaceError(StorageError):
    """The directory of the entries cannot be written to, or has too little room."""

    def __init__(self, problem: str, which: str) -> None:
        """`which` directory to take instead: one `that can`, or `with more room`."""
        self.problem = problem
        self.which = which
        cure = f"set data.cache_dir (or DATASET_CACHE_DIR) to a directory {which}"
        super().__init__(f"{problem}; {cure}")


@contextmanager
def beside(root: Path, key_hash: str) -> Iterator[HeldDirectory]:
    """A new directory to fill; it is gone at the end unless it was published."""
    with _opened(root) as cache, _staging(root, cache, key_hash) as directory:
        try:
            yield directory
        finally:
            _remove(cache, directory)


@contextmanager
def going_on(root: Path, key_hash: str) -> Iterator[HeldDirectory]:
    """Like `beside`, but with what a builder of the same key left that was killed. What is
    unfinished at the end stays for the next one, unless an error says that it would end the same
    (a text that broke off may come back)."""
    with _opened(root) as cache, _staging(root, cache, key_hash, resume=True) as directory:
        keep = True
        try:
            yield directory
        except (DataError, StorageError) as error:
            keep = isinstance(error, BrokenOffError)
            raise
        finally:
            if not (keep and directory.has(UNFINISHED)):
                _remove(cache, directory)


@contextmanager
def _opened(root: Path) -> Iterator[HeldDirectory]:
    with storage_errors(root):
        cache = hold_cache(root)
    with cache:
        yield cache


@contextmanager
def _staging(
    root: Path, cache: HeldDirectory, key_hash: str, *, resume: bool = False
) -> Iterator[HeldDirectory]:
    name = f"{TMP_PREFIX}{key_hash}-{_owner()}-{next(_serial)}"
    with storage_errors(root):
        directory = _taken_over(cache, key_hash, name) if resume else None
        directory = directory or _made(cache, name)
    with directory:
        yield directory


def _made(cache: HeldDirectory, name: str) -> HeldDirectory:
    """A new directory in which nobody else can make a link."""
    cache.make_directory(name, _NOBODY_ELSE_WRITES)
    directory = cache.directory(name)
    try:
        if not is_ours(directory) or directory.names():
            raise PermissionError(errno.EPERM, f"another user replaced {name}")
    except BaseException:
        directory.close()
        raise
    return directory


def _taken_over(cache: HeldDirectory, key_hash: str, name: str) -> HeldDirectory | None:
    left = sorted(unfinished(cache, key_hash), key=lambda name: _saved(cache, name), reverse=True)
    for old in left:
        with suppress(OSError):
            directory = _claimed(cache, old, name) if is_dead(cache, old) else None
            if directory is not None:
                return directory
    return None


def _claimed(cache: HeldDirectory, old: str, name: str) -> HeldDirectory | None:
    """By a rename: of two who try, one has it. Only our own, into which nobody else could write."""
    with cache.directory(old) as left:
        if not _resumable(left):
            return None
        cache.rename(old, cache, name)
        directory = cache.directory(name)
        if os.path.samestat(directory.status(), left.status()):
            return directory
    directory.close()
    return None


def _resumable(directory: HeldDirectory) -> bool:
    others_write = directory.status().st_mode & OTHERS_WRITE
    return not others_write and directory.has(UNFINISHED) and is_ours(directory)


def _saved(cache: HeldDirectory, name: str) -> float:
    """When the last note of progress was made; 0: there is none."""
    with suppress(OSError), cache.directory(name) as directory:
        return directory.lstat(UNFINISHED).st_mtime
    return 0.0


def _remove(cache: HeldDirectory, directory: HeldDirectory) -> None:
    """What was filled, unless its name is gone (it was published) or leads elsewhere by now."""
    with suppress(OSError):
        cache.remove_held(directory)


def write_synced(directory: HeldDirectory, name: str, data: bytes) -> FileEntry:
    """Write a whole new file of a directory that is being filled, fsync it. Raises StorageError."""
    with storage_errors(directory.path.parent), directory.create(name) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def publish(filled: HeldDirectory, final: Path) -> bool:
    """Make `filled`, its files synced, appear as `final`; False when somebody else was first."""
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
    """Move a bad entry out of the way, kept to find out what happened to it; gone
    already: somebody else does the same."""
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
    """Remove an entry; False: it is gone already. Raises StorageError."""
    if entry.name.startswith((TMP_PREFIX, BAD_PREFIX)):
        return _remove_hidden(root, entry.name)
    # First out of sight, in one step: nobody ever opens half of it.
    with beside(root, key_hash) as directory, storage_errors(root), hold_cache(root) as cache:
        try:
            with _parent(cache, entry) as place:
                place.rename(entry.name, directory, "entry")
        except FileNotFoundError:
            return False
        directory.clear()
    return True


def _remove_hidden(root: Path, name: str) -> bool:
    """Where it lies: what cannot be removed must not be wrapped once more with every attempt."""
    with storage_errors(root), hold_cache(root) as cache:
        try:
            cache.remove(name)
        except FileNotFoundError:
            return False
    return True


def is_of_another_user(root: Path, entry: Path) -> bool:
    with suppress(OSError), hold_cache(root) as cache, _parent(cache, entry) as place:
        return place.lstat(entry.name).st_uid != os.geteuid()
    return False


def _parent(cache: HeldDirectory, entry: Path) -> HeldDirectory:
    """The directory of an entry: the cache itself, or one in it."""
    return cache.directory(*entry.parent.relative_to(cache.path).parts)


def forget(root: Path, key_hash: str) -> None:
    """Remove what dead builders left of a store that is finished."""
    with suppress(OSError), hold_cache(root) as cache:
        for left in unfinished(cache, key_hash):
            with suppress(OSError):
                if is_dead(cache, left):
                    cache.remove(left)


def sweep(root: Path) -> None:
    """Remove what builders left that did not live to do it, and that nobody will go on with."""
    with hold_cache(root) as cache:
        for left in unfinished(cache):
            with suppress(OSError):  # somebody else sweeps too
                if is_dead(cache, left) and time.time() - _saved(cache, left) > _RESUMABLE_S:
                    cache.remove(left)


def unfinished(cache: HeldDirectory, key_hash: str = "") -> list[str]:
    """Names of directories that were, or are, filled in a cache: of one key, or all."""
    start = f"{TMP_PREFIX}{key_hash}-" if key_hash else TMP_PREFIX
    return [name for name in cache.names() if name.startswith(start) and _TMP.fullmatch(name)]


def unfinished_bytes(root: Path, key_hash: str) -> int:
    """What lies on the disk already of a store that is not finished."""
    total = 0
    with suppress(OSError), hold_cache(root) as cache:
        for left in unfinished(cache, key_hash):
            with suppress(OSError), cache.directory(left) as directory:  # its builder works on it
                total += sum(directory.lstat(name).st_size for name in directory.names())
    return total


def aside(cache: HeldDirectory) -> list[str]:
    """Names of what was set aside in a cache."""
    return [name for name in cache.names() if _BAD.fullmatch(name)]


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


def is_dead(cache: HeldDirectory, name: str) -> bool:
    """Whether the builder that a directory's name tells of is gone. Raises OSError."""
    match name.removeprefix(TMP_PREFIX).split("-"):
        case [_, place, pid, started, *_] if place == place_id() and pid.isdigit():
            return start_time(int(pid)) != started
        case _:
            return time.time() - cache.lstat(name).st_mtime > _FOREIGN_TMP_AGE_S


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
