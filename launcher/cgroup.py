"""A cgroup (version 2) for a run's workers, where one may be made: a bonus to `containment`.

Whatever a process does, its children are in its cgroup, and `cgroup.kill` ends all of them at once,
those who are just being forked, too. Standard library only: the guardian imports this.
"""

import os
import select
import time
from collections.abc import Iterator
from contextlib import suppress

MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""The second one beside version 1."""
EMPTY_WAIT_S = 0.5


def make(name: str) -> str | None:
    """The directory of a new cgroup below our own; None: we may not, or the kernel is too old."""
    for parent in _own():
        directory = f"{parent}/{name}"
        with suppress(OSError):
            os.mkdir(directory)
            if os.access(f"{directory}/cgroup.kill", os.W_OK):
                return directory
            os.rmdir(directory)
    return None


def add(directory: str, pid: int) -> None:
    """Move a process into it, if it lives. The first time this takes 5 to 26 ms (a grace period of
    the kernel's RCU), so it is nothing for who has to start workers."""
    _write(f"{directory}/cgroup.procs", pid)


def kill(directory: str) -> None:
    """SIGKILL to everybody in it."""
    _write(f"{directory}/cgroup.kill", 1)


def remove(directory: str, wait_s: float = EMPTY_WAIT_S) -> None:
    """When it is empty, for which it waits a moment: the dead leave it a little later than they
    die. Nothing happens when it is gone, or holds somebody whom SIGKILL can't kill."""
    with suppress(OSError):
        fd = os.open(f"{directory}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _wait_until_empty(fd, wait_s)
        finally:
            os.close(fd)
        for entry in os.scandir(directory):
            if entry.is_dir():
                remove(entry.path)  # of a supervisor that one of our workers was
        os.rmdir(directory)


def remove_named(name: str) -> None:
    """`remove` what `make` made, by whichever process."""
    for parent in _own():
        remove(f"{parent}/{name}")


def _wait_until_empty(events_fd: int, wait_s: float) -> None:
    waiter = select.poll()
    waiter.register(events_fd, select.POLLPRI)
    deadline = time.monotonic() + wait_s
    while b"populated 1" in os.pread(events_fd, 4096, 0):
        if (left_s := deadline - time.monotonic()) <= 0:
            return
        waiter.poll(left_s * 1000)  # wakes when the file has changed since it was read


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
