"""A cgroup of version 2 for a run's workers, where one may be made: the first layer.

Whatever a process does, its children are in its cgroup, and `cgroup.kill` ends all of them at once,
those that are just being forked, too. The search in `processes` is the second layer. Standard
library only: the guardian imports this.
"""

import fcntl
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from launcher.contain.processes import read_proc

MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""The second one is where version 1 is mounted, too."""
EMPTY_WAIT_S = 0.5
_PREFIX = "model_check_"
_NAME_LENGTH = len(_PREFIX) + 32
"""A run's tag has 32 hexadecimal digits."""


class Cgroup(NamedTuple):
    """A new cgroup. A lock on its directory holds it as long as this process lives: anybody may
    remove an empty one that is not held."""

    directory: str
    lock_fd: int

    def add(self, pid: int) -> None:
        """Move a process into it, if it lives. The first time this takes 5 to 26 ms (a grace period
        of the kernel's RCU), so the process that starts workers must not wait for it."""
        _write(f"{self.directory}/cgroup.procs", pid)

    def kill(self) -> None:
        """SIGKILL to every process in it."""
        _write(f"{self.directory}/cgroup.kill", 1)


def make(tag: str) -> Cgroup | None:
    """A new cgroup below our own; None: we may not, or the kernel is too old. Removes those that
    earlier runs left there. Its lock stays with this process."""
    for parent in _own():
        for left in leftovers(parent):
            remove(left, wait_s=0)
        directory = f"{parent}/{_PREFIX}{tag}"
        with suppress(OSError):
            os.mkdir(directory)
            can_kill = os.access(f"{directory}/cgroup.kill", os.W_OK)
            if can_kill and (lock_fd := _lock(directory)) is not None:
                return Cgroup(directory, lock_fd)
            os.rmdir(directory)
    return None


def remove_of(tag: str) -> None:
    """Remove the cgroup that another process made for this run, if there is one."""
    for parent in _own():
        remove(f"{parent}/{_PREFIX}{tag}")


def leftovers(parent: str) -> Iterator[str]:
    """The cgroups of runs, directly below `parent`, that no process holds any more. One that is not
    empty has processes that SIGKILL could not end."""
    with suppress(OSError):
        for name in os.listdir(parent):
            if not (name.startswith(_PREFIX) and len(name) == _NAME_LENGTH):
                continue
            if (lock_fd := _lock(path := f"{parent}/{name}")) is not None:
                os.close(lock_fd)
                yield path


def remove(directory: str, wait_s: float = EMPTY_WAIT_S) -> None:
    """Remove it when it is empty, for which it waits a moment: dead processes leave it a little
    later than they die. Nothing happens when it is gone, or when SIGKILL can't end a process in
    it."""
    with suppress(OSError):
        if not _becomes_empty(directory, wait_s):
            return
        for entry in os.scandir(directory):
            if entry.is_dir():
                remove(entry.path, 0)  # of a supervisor that one of our workers was
        os.rmdir(directory)


def _becomes_empty(directory: str, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    with open(f"{directory}/cgroup.events", "rb", buffering=0) as events:
        waiter = select.poll()
        waiter.register(events, select.POLLPRI)
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            waiter.poll(left_s * 1000)  # wakes when the file has changed since it was read
    return True


def _lock(directory: str) -> int | None:
    """The descriptor that holds it; None: another process holds it, or it cannot be opened."""
    with suppress(OSError), ExitStack() as otherwise:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        otherwise.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        otherwise.pop_all()
        return fd
    return None


def _own() -> list[str]:
    """The directory of this process's own cgroup, if we may move processes out of it."""
    lines = os.fsdecode(read_proc(os.getpid(), "cgroup")).splitlines()
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    places = [f"{mount}{path}".rstrip("/") for path in paths for mount in MOUNTS]
    return [place for place in places if os.access(f"{place}/cgroup.procs", os.W_OK)]


def _write(path: str, number: int) -> None:
    # The cgroup is gone, or we may not after all: the other layer remains.
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        file.write(b"%d" % number)
