"""A cgroup (version 2) for a run's workers, where one may be made: a bonus to `containment`.

Whatever a process does, its children are in its cgroup, and `cgroup.kill` ends all of them at once,
those who are just being forked, too. Standard library only: the guardian imports this.
"""

import fcntl
import os
import select
import time
from collections.abc import Iterator
from contextlib import suppress

MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""The second one beside version 1."""
EMPTY_WAIT_S = 0.5
_PREFIX = "model_check_"
_TAG_DIGITS = 32


def name_for(tag: str) -> str:
    """The name of a run's cgroup; `tag`: 32 hexadecimal digits."""
    return _PREFIX + tag


def _is_a_runs(name: str) -> bool:
    tag = name.removeprefix(_PREFIX)  # not by `re`, whose import the guardian's start would pay
    return tag != name and len(tag) == _TAG_DIGITS and not tag.strip("0123456789abcdef")


class Cgroup:
    """A new cgroup, held by a lock on its directory as long as this process lives: one that nobody
    holds is anybody's to remove when it is empty."""

    def __init__(self, directory: str, lock_fd: int) -> None:
        self.directory = directory
        self._lock_fd = lock_fd

    def add(self, pid: int) -> None:
        """Move a process into it, if it lives. The first time this takes 5 to 26 ms (a grace period
        of the kernel's RCU), so it is nothing for who has to start workers."""
        _write(f"{self.directory}/cgroup.procs", pid)

    def kill(self) -> None:
        """SIGKILL to everybody in it."""
        _write(f"{self.directory}/cgroup.kill", 1)

    def remove(self, wait_s: float = EMPTY_WAIT_S) -> None:
        """As `remove` does, and let go of it."""
        remove(self.directory, wait_s)
        os.close(self._lock_fd)


def make(name: str) -> Cgroup | None:
    """A new cgroup below our own; None: we may not, or the kernel is too old. Those of earlier runs
    that stayed for want of somebody to remove them are removed."""
    for parent in _own():
        for directory in leftovers(parent):
            remove(directory, 0)
        directory = f"{parent}/{name}"
        with suppress(OSError):
            os.mkdir(directory)
            lock_fd = _lock(directory)
            if lock_fd is not None and os.access(f"{directory}/cgroup.kill", os.W_OK):
                return Cgroup(directory, lock_fd)
            if lock_fd is not None:
                os.close(lock_fd)
            os.rmdir(directory)
    return None


def leftovers(parent: str) -> list[str]:
    """The cgroups of runs, directly below `parent`, that nobody holds any more. One that is not
    empty has processes that SIGKILL could not end."""
    try:
        names = [name for name in os.listdir(parent) if _is_a_runs(name)]
    except OSError:
        return []
    return [path for name in names if not _is_held(path := f"{parent}/{name}")]


def remove(directory: str, wait_s: float = EMPTY_WAIT_S) -> None:
    """When it is empty, for which it waits a moment: the dead leave it a little later than they
    die. Nothing happens when it is gone, or holds somebody whom SIGKILL can't kill."""
    with suppress(OSError):
        if not _becomes_empty(directory, wait_s):
            return
        for entry in os.scandir(directory):
            if entry.is_dir():
                remove(entry.path, 0)  # of a supervisor that one of our workers was
        os.rmdir(directory)


def remove_named(name: str) -> None:
    """`remove` what `make` made, by whichever process."""
    for parent in _own():
        remove(f"{parent}/{name}")


def _becomes_empty(directory: str, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    fd = os.open(f"{directory}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        waiter = select.poll()
        waiter.register(fd, select.POLLPRI)
        while b"populated 1" in os.pread(fd, 4096, 0):
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            waiter.poll(left_s * 1000)  # wakes when the file has changed since it was read
    finally:
        os.close(fd)
    return True


def _lock(directory: str) -> int | None:
    """The descriptor that holds it; None: somebody else has the lock."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _is_held(directory: str) -> bool:
    """True also when that can't be told."""
    try:
        fd = _lock(directory)
    except OSError:  # gone, or not ours to open
        return True
    if fd is None:
        return True
    os.close(fd)
    return False


def _own() -> Iterator[str]:
    """Our own cgroup's directory, if it is there and its processes are ours to move."""
    try:
        with open("/proc/self/cgroup") as file:
            paths = [line[3:].strip() for line in file if line.startswith("0::")]
    except OSError:  # a kernel without cgroups
        return
    for path in paths:
        for mount in MOUNTS:
            if os.access(f"{mount}{path}/cgroup.procs", os.W_OK):
                yield f"{mount}{path}".rstrip("/")


def _write(path: str, number: int) -> None:
    with suppress(OSError):  # gone, or not allowed after all: the other layers remain
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d" % number)
        finally:
            os.close(fd)
