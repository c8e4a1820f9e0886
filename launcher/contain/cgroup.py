"""A cgroup of version 2 that holds a run's workers: the first layer, where one can be made.

A process's children are in its cgroup, whatever they change about themselves, and `cgroup.kill`
ends all of them at once, also one that is just being forked. The search in `processes` is the
second layer. Standard library only: the guardian imports this.
"""

import errno
import fcntl
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from launcher.contain.processes import read_proc

MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Version 2 is mounted at the second one where version 1 is in use, too."""
EMPTY_WAIT_S = 0.5
_KILL_AGAIN_S = 0.05
_MAX_TRIES = 10
_PREFIX = "model_check_"
_NUM_RANDOM = 16
"""Bytes of a name, each two hexadecimal digits."""
_NAME_LENGTH = len(_PREFIX) + 2 * _NUM_RANDOM


class Cgroup(NamedTuple):
    """A new cgroup. The caller closes it; its processes and its directory are `clear`'s."""

    directory: str
    lock_fd: int
    """Holds a lock on the directory for this process and for those that inherit it: a cgroup
    without a holder is a leftover."""
    entry_fd: int
    """A process that writes `0` into it is inside."""

    def close(self) -> None:
        os.close(self.lock_fd)
        os.close(self.entry_fd)


def make() -> Cgroup | None:
    """A new cgroup below our own; None: that is not allowed, or the kernel is too old."""
    for parent in _own():
        # Whoever looks for leftovers may lock it before we have, and will remove what is there by
        # its path: another try has another name.
        for _ in range(_MAX_TRIES):
            with suppress(OSError):
                return _made(f"{parent}/{_PREFIX}{os.urandom(_NUM_RANDOM).hex()}")
    return None


def _made(directory: str) -> Cgroup:
    """Raises OSError."""
    with ExitStack() as otherwise:
        os.mkdir(directory)
        otherwise.callback(os.rmdir, directory)  # not `clear`: it may be no cgroup
        lock_fd = _lock(directory)
        otherwise.callback(os.close, lock_fd)
        os.close(os.open(f"{directory}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC))
        entry_fd = os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        otherwise.pop_all()
    return Cgroup(directory, lock_fd, entry_fd)


def clear_leftovers() -> None:
    """Clear the cgroups that earlier runs left below our own. Does not wait: the next run removes
    what is not empty yet."""
    for parent in _own():
        for directory in leftovers(parent):
            clear(directory, wait_s=0)


def leftovers(parent: str) -> Iterator[str]:
    """The cgroups of runs, directly below `parent`, whose launcher and guardian are dead. Each is
    locked until the next one is asked for."""
    with suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(_PREFIX) and len(name) == _NAME_LENGTH:
                with suppress(OSError), ExitStack() as held:
                    held.callback(os.close, _lock(path := f"{parent}/{name}"))
                    yield path


def clear(directory: str, wait_s: float = EMPTY_WAIT_S) -> None:
    """SIGKILL to every process in it until it is empty, then remove it. Gives up after `wait_s`,
    when SIGKILL cannot end a process in it. Nothing happens when it is gone, or is ``."""
    deadline = time.monotonic() + wait_s
    with suppress(OSError):
        while _becomes_empty(directory, deadline):
            for entry in os.scandir(directory):
                if entry.is_dir():
                    clear(entry.path, 0)  # made by a launcher that one of our workers was
            try:
                os.rmdir(directory)
            except OSError as error:
                # A worker that was just being started has entered meanwhile.
                if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                    raise
            else:
                return


def _becomes_empty(directory: str, deadline: float) -> bool:
    """Kills again and again: a worker that was just being started enters after the first time."""
    with open(f"{directory}/cgroup.events", "rb", buffering=0) as events:
        waiter = select.poll()
        waiter.register(events, select.POLLPRI)
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            with open(f"{directory}/cgroup.kill", "wb", buffering=0) as kill:
                kill.write(b"1")
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            # Dead processes leave it a little later than they die. The file's change wakes us.
            waiter.poll(min(left_s, _KILL_AGAIN_S) * 1000)
    return True


def _lock(directory: str) -> int:
    """A descriptor that holds it. Raises OSError when another process holds it."""
    with ExitStack() as otherwise:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        otherwise.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        otherwise.pop_all()
    return fd


def _own() -> list[str]:
    """The directory of this process's own cgroup, if we may move processes out of it."""
    lines = os.fsdecode(read_proc(os.getpid(), "cgroup")).splitlines()
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    places = [f"{mount}{path}".rstrip("/") for path in paths for mount in MOUNTS]
    return [place for place in places if os.access(f"{place}/cgroup.procs", os.W_OK)]
