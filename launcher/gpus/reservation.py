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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from launcher.gpus.choose import auto_count, in_pci_order, rank_free, take, why_busy, why_unusable
from launcher.gpus.probe import Gpu
from model_check.errors import NoGpuError, StorageError, UsageError

LOCK_DIR = "MODEL_CHECK_LOCK_DIR"
SHARED_DIR_MODE = 0o1777
SHARED_FILE_MODE = 0o666
LONGEST_CONTENT = 4096
_FLOCK_TRIES = 3
_FLOCK_PAUSE_S = 0.002
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Reservation:
    """Locked GPUs. Held until `release`, or until this process ends in whatever way."""

    def __init__(self, lock_dir: Path | None = None) -> None:
        """Holds nothing yet. `lock_dir`: None for the one of all launchers on this machine."""
        self._lock_dir = lock_dir or default_lock_dir()
        self._labels: list[str] = []
        self._descriptors: list[int] = []

    def __repr__(self) -> str:
        state = "held" if self._descriptors else "released"
        return f"<Reservation of {', '.join(self._labels)}, {state}>"

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def lock(self, gpu: Gpu) -> str | None:
        """Lock one more GPU. Never waits. None: it is ours now; else the process that holds it.

        Raises StorageError when no lock file can be had.
        """
        path = _path(gpu, self._lock_dir)
        try:
            descriptor = _open(path)
            self._descriptors.append(descriptor)
            if not _try_flock(descriptor):
                holder = _holder(descriptor)
                os.close(self._descriptors.pop())
                return holder
        except OSError as error:
            raise StorageError(
                f"{path}: cannot serve as a lock: {error.strerror or error}; have it removed, or "
                f"set {LOCK_DIR} to a directory for all users of this machine"
            ) from error
        _sign(descriptor)
        self._labels.append(gpu.label)
        return None

    def release(self) -> None:
        """Let others have the GPUs. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def reserve(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> Reservation:
    """Lock all of `gpus`, or none. Never waits.

    Raises NoGpuError naming the GPU and its holder, StorageError when no lock file can be had.
    """
    with ExitStack() as on_error:
        reservation = on_error.enter_context(Reservation(lock_dir))
        # All launchers lock in one order, so that one of two that want the same GPUs gets them.
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            if holder := reservation.lock(gpu):
                raise NoGpuError(
                    f"{gpu.title} is reserved by {holder}: wait for it, or choose others with "
                    "--gpus"
                )
        on_error.pop_all()
    return reservation


def reserve_auto(
    selector: str, look: Callable[[], Sequence[Gpu]], lock_dir: Path | None = None
) -> tuple[list[Gpu], Reservation]:
    """Pick and lock the freest GPUs: `auto` or `auto:N` of those that `look` returns.

    `look` is asked again after locking: a GPU that got busy in between (by a program that knows no
    lock) is given back, and the choice starts anew with what was seen. Raises as `reserve` does.
    """
    seen = look()
    for _ in range(len(seen) + 1):
        with ExitStack() as otherwise:
            reservation = otherwise.enter_context(Reservation(lock_dir))
            picked = _freest(selector, seen, reservation.lock)
            seen = look()
            chosen = _still_good(picked, seen)
            if chosen is not None:
                otherwise.pop_all()
                return chosen, reservation
    raise NoGpuError(f"--gpus {selector}: GPUs get busy faster than they can be reserved")


def look_auto(selector: str, seen: Sequence[Gpu], lock_dir: Path | None = None) -> list[Gpu]:
    """What `reserve_auto` would pick of `seen` now. Locks nothing for longer than the look takes,
    makes no file. Raises NoGpuError as it does."""
    return _freest(selector, seen, lambda gpu: _holder_of(gpu, lock_dir))


def holders(gpus: Sequence[Gpu], lock_dir: Path | None = None) -> list[str]:
    """A line for each GPU that another launcher holds now."""
    return [
        f"{gpu.title} is reserved by {holder}: a run would be refused"
        for gpu in gpus
        if (holder := _holder_of(gpu, lock_dir))
    ]


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


def _freest(
    selector: str, seen: Sequence[Gpu], holder_of: Callable[[Gpu], str | None]
) -> list[Gpu]:
    """As many GPUs as `selector` asks for, the freest that no other launcher holds, in PCI order.

    `holder_of` is asked in the order of the ranking, until there are enough. Raises NoGpuError.
    """
    count = auto_count(selector)
    if count is None:
        raise UsageError(f"--gpus {selector}: only auto and auto:N pick by themselves")
    ranked = rank_free(seen)
    take(ranked, count, seen)
    free: list[Gpu] = []
    reserved: list[str] = []
    for gpu in ranked:
        if holder := holder_of(gpu):
            reserved.append(f"{gpu.title} is reserved by {holder}")
        else:
            free.append(gpu)
        if len(free) == count:
            return in_pci_order(free)
    raise NoGpuError(f"--gpus auto: {count} wanted, {len(free)} free; {'; '.join(reserved)}")


def _still_good(picked: Sequence[Gpu], seen: Sequence[Gpu]) -> list[Gpu] | None:
    """`picked` as they are in `seen`; None when one is gone, unusable or newly busy."""
    now = {gpu.uuid: gpu for gpu in seen if why_unusable(gpu) is None}
    for gpu in picked:
        if gpu.uuid not in now or (why_busy(now[gpu.uuid]) and not why_busy(gpu)):
            return None
    return [now[gpu.uuid] for gpu in picked]


def _path(gpu: Gpu, lock_dir: Path) -> Path:
    return lock_dir / f"{re.sub('[^A-Za-z0-9-]', '_', gpu.uuid)}.lock"


def _holder_of(gpu: Gpu, lock_dir: Path | None) -> str | None:
    """The process that holds the lock of `gpu`; None: none, as far as can be seen without making
    a file."""
    with suppress(OSError):
        descriptor = os.open(_path(gpu, lock_dir or default_lock_dir()), os.O_RDONLY | _OPEN)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(descriptor)
        finally:
            os.close(descriptor)
    return None


def _try_flock(descriptor: int) -> bool:
    """False when another process has the lock. Raises OSError on a file system without locks."""
    for _ in range(_FLOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            # A dry run that looks has it for a few microseconds.
            time.sleep(_FLOCK_PAUSE_S)
    return False


def _open(path: Path) -> int:
    """Open or make a lock file that every user can open. Raises OSError.

    Every user may write to the directory: a link, a pipe or a hard link that another user laid
    there is refused, so that nothing is written elsewhere.
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
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _open_shared(name: str, directory: int) -> int:
    # O_CREAT never without O_EXCL: with fs.protected_regular the kernel refuses to open another
    # user's file so in a sticky directory, even to root.
    create = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
    with _no_umask(), suppress(FileExistsError):
        return os.open(name, create, SHARED_FILE_MODE, dir_fd=directory)
    try:
        return os.open(name, os.O_RDWR | _OPEN, dir_fd=directory)
    except PermissionError:
        return os.open(name, os.O_RDONLY | _OPEN, dir_fd=directory)  # flock needs no more


@contextmanager
def _no_umask() -> Iterator[None]:
    """What is made here is for all users from its first moment on (a chmod would come later)."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


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
    except (ValueError, TypeError, KeyError):
        return "another launcher"
    text += "" if host == socket.gethostname() else f" on {host}"
    return "".join(character for character in text if character.isprintable())


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container with a user id of no name
        return f"uid {os.getuid()}"
