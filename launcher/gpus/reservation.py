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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from launcher.gpus.choose import freest, why_busy, why_unusable
from launcher.gpus.probe import Gpu
from model_check.errors import NoGpuError, StorageError
from model_check.utils.held import OTHERS_WRITE, make_unlinked, user_name
from model_check.utils.lock import try_lock

LOCK_DIR = "MODEL_CHECK_LOCK_DIR"
SHARED_DIR_MODE = 0o1777
SHARED_FILE_MODE = 0o666
LONGEST_CONTENT = 4096
_LOCK_TRIES = 3
_LOCK_PAUSE_S = 0.002
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Reservation(ExitStack[None]):
    """Locked GPUs: held until `close`, or until this process ends in whatever way."""


def reserve(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> Reservation:
    """Lock all of `gpus`, or none. Never waits. `lock_dir`: None for the one of all launchers on
    this machine.

    Raises NoGpuError naming the GPU and its holder, StorageError when no lock file can be had.
    """
    with Reservation() as locks:
        # All launchers lock in one order, so that one of two that want the same GPUs gets them.
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            if holder := _lock(locks, lock_dir, gpu):
                raise NoGpuError(
                    f"{gpu.title} is reserved by {holder}: wait for it, or choose others with "
                    "--gpus"
                )
        return locks.pop_all()


def reserve_auto(
    count: int, look: Callable[[], Sequence[Gpu]], lock_dir: Path | None = None
) -> tuple[list[Gpu], Reservation]:
    """Pick and lock the `count` freest GPUs of those that `look` returns.

    `look` is asked again after locking: a GPU that got busy in between (by a program that knows no
    lock) is given back, and the choice starts anew with what was seen. Raises as `reserve` does.
    """
    seen = look()
    for _ in range(len(seen) + 1):
        with Reservation() as locks:
            picked = freest(count, seen, partial(_lock, locks, lock_dir))
            seen = look()
            chosen = _still_good(picked, seen)
            if chosen is not None:
                return chosen, locks.pop_all()
    raise NoGpuError("--gpus auto: GPUs get busy faster than they can be reserved")


def look_auto(count: int, seen: Sequence[Gpu], lock_dir: Path | None = None) -> list[Gpu]:
    """What `reserve_auto` would pick of `seen` now. Locks nothing for longer than the look takes,
    makes no file. Raises NoGpuError as it does."""
    return freest(count, seen, partial(_holder_of, lock_dir))


def holders(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> list[str]:
    """A line for each GPU that another launcher holds now."""
    return [
        f"{gpu.title} is reserved by {holder}: a run would be refused"
        for gpu in gpus
        if (holder := _holder_of(lock_dir, gpu))
    ]


def free(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> list[Gpu]:
    """Those of `gpus` that nobody uses, and no launcher holds, now."""
    idle = [gpu for gpu in gpus if why_unusable(gpu) is None and why_busy(gpu) is None]
    return [gpu for gpu in idle if _holder_of(lock_dir, gpu) is None]


def who_can_delete(lock_dir: Path | None = None) -> str | None:
    """Who, besides us and root, may delete locks that others hold, so that two launchers get one
    GPU; None: nobody, or there is no directory yet."""
    with suppress(OSError):
        status = (lock_dir or default_lock_dir()).stat()
        if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            return "everybody who may write there"
        if status.st_uid not in (0, os.geteuid()):
            return user_name(status.st_uid)
    return None


def default_lock_dir() -> Path:
    """The directory that every launcher on this machine uses, for all its users."""
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


def _still_good(picked: Sequence[Gpu], seen: Sequence[Gpu]) -> list[Gpu] | None:
    """`picked` as they are in `seen`; None when one is gone, unusable or newly busy."""
    now = {gpu.uuid: gpu for gpu in seen if why_unusable(gpu) is None}
    for gpu in picked:
        if gpu.uuid not in now or (why_busy(now[gpu.uuid]) and not why_busy(gpu)):
            return None
    return [now[gpu.uuid] for gpu in picked]


def _path(lock_dir: Path | None, gpu: Gpu) -> Path:
    name = re.sub("[^A-Za-z0-9-]", "_", gpu.uuid)
    return (lock_dir or default_lock_dir()) / f"{name}.lock"


def _lock(locks: Reservation, lock_dir: Path | None, gpu: Gpu) -> str | None:
    """Lock one more GPU. Never waits. None: `locks` holds it now; else the process that holds it.

    Raises StorageError when no lock file can be had.
    """
    path = _path(lock_dir, gpu)
    try:
        for _ in range(_LOCK_TRIES):
            with ExitStack() as otherwise:
                descriptor = _open(path)
                otherwise.callback(os.close, descriptor)
                if not _locked(descriptor):
                    return _holder(descriptor)
                if _is_at(path, descriptor):
                    _sign(descriptor)
                    locks.push(otherwise.pop_all())
                    return None
        raise OSError(errno.ESTALE, "somebody deletes it again and again")
    except OSError as error:
        raise StorageError(
            f"{path}: cannot serve as a lock: {error.strerror or error}; have it removed, or "
            f"set {LOCK_DIR} to a directory for all users of this machine"
        ) from error


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the name still leads to the open file. Deleted between our opening and our locking,
    it would lock nobody out: the next launcher makes a new one."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def _holder_of(lock_dir: Path | None, gpu: Gpu) -> str | None:
    """The process that holds the lock of `gpu`; None: none, as far as can be seen without making
    a file."""
    with suppress(OSError):
        descriptor = os.open(_path(lock_dir, gpu), os.O_RDONLY | _OPEN)
        try:
            # Shared, which filelock has not: several may look, and NFS grants no other to readers.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(descriptor)
        finally:
            os.close(descriptor)
    return None


def _locked(descriptor: int) -> bool:
    """False when another process has the lock. Raises OSError on a file system without locks."""
    for _ in range(_LOCK_TRIES):
        if try_lock(descriptor):
            return True
        # A dry run that looks has it for a few microseconds.
        time.sleep(_LOCK_PAUSE_S)
    return False


def _open(path: Path) -> int:
    """Open or make a lock file that every user can open. Raises OSError.

    Every user may write to the directory: a link, a pipe or a hard link that another user laid
    there is refused, so that nothing is written elsewhere.
    """
    make_unlinked(path.parent.parent)
    with ExitStack() as after:
        # What is made here is for all users from its first moment on (a chmod would come later).
        after.callback(os.umask, os.umask(0))
        with suppress(FileExistsError):
            path.parent.mkdir(SHARED_DIR_MODE)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        after.callback(os.close, directory)
        descriptor = _open_shared(path.name, directory)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file of its own")
    return descriptor


def _open_shared(name: str, directory: int) -> int:
    # O_CREAT never without O_EXCL: with fs.protected_regular the kernel refuses to open another
    # user's file so in a sticky directory, even to root.
    create = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
    with suppress(FileExistsError):
        return os.open(name, create, SHARED_FILE_MODE, dir_fd=directory)
    try:
        return os.open(name, os.O_RDWR | _OPEN, dir_fd=directory)
    except PermissionError:
        return os.open(name, os.O_RDONLY | _OPEN, dir_fd=directory)  # flock needs no more


def _sign(descriptor: int) -> None:
    """Write into the lock file which process holds it, for the messages of others."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "user": _user(), "host": socket.gethostname(), "since": since}
    with suppress(OSError):  # a full disk, a file of another user: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _holder(descriptor: int) -> str:
    """The process that holds the lock, as far as the file tells: anybody can write into it."""
    try:
        holder = json.loads(os.pread(descriptor, LONGEST_CONTENT, 0))
        pid, user, host = int(holder["pid"]), str(holder["user"]), str(holder["host"])
        text = f"pid {pid} ({user}, since {holder['since']})"
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "another launcher"
    text += "" if host == socket.gethostname() else f" on {host}"
    return "".join(character for character in text if character.isprintable())


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container with a user id of no name
        return f"uid {os.getuid()}"
