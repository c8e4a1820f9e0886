"""GPUs held by this launcher against other launchers on the machine: one file lock a GPU.

flock, because the kernel drops it with the last descriptor: a holder that is killed holds nothing.
The descriptors are close-on-exec, so the launcher holds, never a worker. Lock files are never
deleted (two holders could then lock two files of one name), are shared by all users, and their
content only serves messages. Containers with a /tmp of their own do not see each other's locks;
there only the driver's exclusive compute mode helps.
"""

import errno
import fcntl
import json
import os
import pwd
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from launcher.gpus.choose import auto_count, rank_free, take, why_busy, why_unusable
from launcher.gpus.probe import Gpu
from model_check.errors import NoGpuError, StorageError, UsageError

LOCK_DIR = "MODEL_CHECK_LOCK_DIR"
SHARED_DIR_MODE = 0o1777
SHARED_FILE_MODE = 0o666
LONGEST_CONTENT = 4096
_FLOCK_TRIES = 3
_FLOCK_PAUSE_S = 0.002


class Reservation:
    """Locked GPUs. Held until `release`, or until this process ends in whatever way."""

    def __init__(self, gpus: Sequence[Gpu], descriptors: Sequence[int]) -> None:
        self.gpus = tuple(gpus)
        self._descriptors = list(descriptors)

    def __repr__(self) -> str:
        state = "held" if self._descriptors else "released"
        return f"<Reservation of {', '.join(gpu.label for gpu in self.gpus)}, {state}>"

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let others have the GPUs. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class _Taken(Exception):
    """Another process holds the lock; the text says who."""


def reserve(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> Reservation:
    """Lock all of `gpus`, or none. Never waits.

    Raises NoGpuError naming the GPU and its holder, StorageError when no lock file can be had.
    """
    held: list[int] = []
    try:
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):  # one order for all: one of two wins
            held.append(_lock(gpu, lock_dir or default_lock_dir()))
    except _Taken as taken:
        _close(held)
        raise NoGpuError(
            f"{gpu.title} is reserved by {taken}: wait for it, or choose others with --gpus"
        ) from None
    except BaseException:
        _close(held)
        raise
    return Reservation(gpus, held)


def reserve_auto(
    selector: str, look: Callable[[], Sequence[Gpu]], lock_dir: Path | None = None
) -> tuple[list[Gpu], Reservation]:
    """Pick and lock the freest GPUs: `auto` or `auto:N` of those that `look` returns.

    `look` is asked again after locking: a GPU that got busy in between (by a program that knows no
    lock) is given back, and the choice starts anew with what was seen. Raises as `reserve` does.
    """
    count = auto_count(selector)
    if count is None:
        raise UsageError(f"--gpus {selector}: only auto and auto:N pick by themselves")
    seen = look()
    for _ in range(len(seen) + 1):
        reservation = _lock_freest(seen, count, lock_dir or default_lock_dir())
        try:
            seen = look()
            chosen = _still_good(reservation.gpus, seen)
        except BaseException:
            reservation.release()
            raise
        if chosen is not None:
            return chosen, reservation
        reservation.release()
    raise NoGpuError(f"--gpus {selector}: GPUs get busy faster than they can be reserved")


def look_auto(selector: str, seen: Sequence[Gpu], lock_dir: Path | None = None) -> list[Gpu]:
    """What `reserve_auto` would pick of `seen` now. Locks nothing for longer than the look takes,
    makes no file. Raises NoGpuError as it does."""
    count = auto_count(selector) or 0
    ranked = rank_free(seen)
    take(ranked, count, seen)
    held = {gpu.uuid: who for gpu in ranked if (who := _holder_of(gpu, lock_dir))}
    free = [gpu for gpu in ranked if gpu.uuid not in held]
    if len(free) < count:
        raise _too_few(
            count,
            len(free),
            [f"{g.title} is reserved by {held[g.uuid]}" for g in ranked if g.uuid in held],
        )
    return sorted(free[:count], key=_position)


def holders(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> list[str]:
    """A line for each GPU that somebody else holds now."""
    held = ((gpu, _holder_of(gpu, lock_dir)) for gpu in gpus)
    return [f"{gpu.title} is reserved by {who}: a run would be refused" for gpu, who in held if who]


def default_lock_dir() -> Path:
    """The directory that every launcher on this machine uses, whoever runs it."""
    named = os.environ.get(LOCK_DIR)
    if named:
        return Path(named)
    # Not "the first that works": root could write to a /run/lock that users cannot, and they would
    # lock in two places. Both tests have the same result for everybody.
    run_lock = Path("/run/lock")
    with suppress(FileNotFoundError):
        if run_lock.stat().st_mode & stat.S_IWOTH and os.access(run_lock, os.W_OK):
            return run_lock / "model_check"
    return Path("/tmp/model_check_locks")


def _lock_freest(seen: Sequence[Gpu], count: int, lock_dir: Path) -> Reservation:
    """Lock the first `count` of the ranking that nobody holds."""
    ranked = rank_free(seen)
    take(ranked, count, seen)
    held: dict[str, int] = {}
    holders: list[str] = []
    try:
        for gpu in ranked:
            try:
                held[gpu.uuid] = _lock(gpu, lock_dir)
            except _Taken as taken:
                holders.append(f"{gpu.title} is reserved by {taken}")
            if len(held) == count:
                gpus = sorted((gpu for gpu in ranked if gpu.uuid in held), key=_position)
                return Reservation(gpus, list(held.values()))
    except BaseException:
        _close(held.values())
        raise
    _close(held.values())
    raise _too_few(count, len(held), holders)


def _too_few(count: int, num_free: int, holders: Sequence[str]) -> NoGpuError:
    return NoGpuError(f"--gpus auto: {count} wanted, {num_free} free; {'; '.join(holders)}")


def _position(gpu: Gpu) -> tuple[int, int]:
    return gpu.index, gpu.mig_index or 0


def _still_good(picked: Sequence[Gpu], seen: Sequence[Gpu]) -> list[Gpu] | None:
    """`picked` as they are in `seen`; None when one is gone, unusable or newly busy."""
    now = {gpu.uuid: gpu for gpu in seen if why_unusable(gpu) is None}
    for gpu in picked:
        if gpu.uuid not in now or (why_busy(now[gpu.uuid]) and not why_busy(gpu)):
            return None
    return [now[gpu.uuid] for gpu in picked]


def _lock(gpu: Gpu, lock_dir: Path) -> int:
    """The descriptor that holds the lock of `gpu`. Raises _Taken, StorageError."""
    path = _path(gpu, lock_dir)
    try:
        descriptor = _open(path)
        if not _try_flock(descriptor):
            holder = _holder(descriptor)
            os.close(descriptor)
            raise _Taken(holder)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot serve as a lock: {error.strerror or error}; have it removed, or set "
            f"{LOCK_DIR} to a directory for all users of this machine"
        ) from error
    _sign(descriptor)
    return descriptor


def _path(gpu: Gpu, lock_dir: Path) -> Path:
    return lock_dir / f"{re.sub('[^A-Za-z0-9-]', '_', gpu.uuid)}.lock"


def _holder_of(gpu: Gpu, lock_dir: Path | None) -> str | None:
    """Who holds the lock of `gpu`; None: nobody, as far as can be seen without making a file."""
    path = _path(gpu, lock_dir or default_lock_dir())
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _try_flock(descriptor: int) -> bool:
    """False when another process has the lock. Closes the descriptor when it raises OSError."""
    for _ in range(_FLOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_FLOCK_PAUSE_S)  # a dry run that looks has it for a few microseconds
        except OSError:  # a file system without locks
            os.close(descriptor)
            raise
        else:
            return True
    return False


def _open(path: Path) -> int:
    """Open or make a lock file that every user can open. Raises OSError.

    The directory is open to everybody: a link, a pipe or a hard link laid there by somebody else is
    refused, so that nothing is written elsewhere.
    """
    directory = _open_directory(path.parent)
    try:
        descriptor = _open_shared(path.name, directory)
    finally:
        os.close(directory)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file of its own")
    return descriptor


def _open_directory(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _no_umask(), suppress(FileExistsError):
        path.mkdir(SHARED_DIR_MODE)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _open_shared(name: str, directory: int) -> int:
    # Never O_CREAT on a file that may exist: with fs.protected_regular the kernel refuses that in a
    # sticky directory when the file is another user's, even to root.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(name, os.O_RDWR | flags, dir_fd=directory)
    except PermissionError:
        return os.open(name, os.O_RDONLY | flags, dir_fd=directory)  # flock needs no more
    except FileNotFoundError:
        pass
    try:
        with _no_umask():
            create = os.O_RDWR | os.O_CREAT | os.O_EXCL | flags
            return os.open(name, create, SHARED_FILE_MODE, dir_fd=directory)
    except FileExistsError:
        return os.open(name, os.O_RDWR | flags, dir_fd=directory)


@contextmanager
def _no_umask() -> Iterator[None]:
    """What is made here is for all users from its first moment on (a chmod would come later)."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def _sign(descriptor: int) -> None:
    """Write who holds the lock, for the messages of others."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "user": _user(), "host": socket.gethostname(), "since": since}
    with suppress(OSError):  # a full disk, a file of another user: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _holder(descriptor: int) -> str:
    """Who holds the lock, as far as the file tells: anybody can write into it."""
    try:
        holder = json.loads(os.pread(descriptor, LONGEST_CONTENT, 0))
        pid, user, host = int(holder["pid"]), str(holder["user"]), str(holder["host"])
        text = f"pid {pid} ({user}, since {holder['since']})"
    except (ValueError, TypeError, KeyError):
        return "another launcher"
    text += "" if host == socket.gethostname() else f" on {host}"
    return "".join(character for character in text if character.isprintable())


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container with a user id of no name
        return f"uid {os.getuid()}"


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
