"""One builder at a time, and the others told whom they wait for.

The lock saves work, nothing else (`publish` makes the cache correct). Where it cannot be had at
all, builders race. Lock files are never deleted: a second holder could then lock a second file of
the same name.
"""

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model_check.data.sharing import share, shared_directory
from model_check.data.text import printable
from model_check.utils.held import HeldDirectory

if TYPE_CHECKING:
    from filelock import UnixFileLock

LOCKS = ".locks"
_OWN_MODE = 0o664
_LONGEST_STATUS = 4096
_FIRST_WAIT_S = 0.2
_WAIT_S = 5.0
_POLL_S = 0.1

Say = Callable[[str], None]


@contextmanager
def build_lock(root: Path, key_hash: str, say: Say) -> Iterator[Say]:
    """Hold the lock of one key; waits, with words, as long as a living process holds it.

    Yields what tells those who wait how far the build is.
    """
    with ExitStack() as stack:
        tell: Say = _unheard
        try:
            locks = stack.enter_context(shared_directory(root, LOCKS))
            status = f"{key_hash}.status.json"
            _acquire(stack.enter_context(_lock(locks, key_hash)), locks, status, say)
            tell = stack.enter_context(_status(locks, status))
        except (OSError, NotImplementedError) as error:  # the latter: a kernel without flock
            why = getattr(error, "strerror", None) or error
            say(f"data: no lock in {root / LOCKS} ({why}): two builders may do the same work")
        yield tell


@contextmanager
def if_idle(root: Path, key_hash: str) -> Iterator[bool]:
    """Hold the lock of one key unless somebody does; whether it is held. Where locks cannot be had
    it is not."""
    from filelock import Timeout

    with ExitStack() as stack:
        idle = False
        with suppress(OSError, Timeout, NotImplementedError):
            locks = stack.enter_context(shared_directory(root, LOCKS))
            stack.enter_context(_lock(locks, key_hash)).acquire(timeout=0)
            idle = True
        yield idle


@contextmanager
def _lock(locks: HeldDirectory, key_hash: str) -> Iterator["UnixFileLock"]:
    """Not held yet; released at the end."""
    from filelock import UnixFileLock  # only builders lock, never who finds a prepared cache

    # By the descriptor, so that nobody can put a link in place of the directory; the file itself
    # filelock opens with O_NOFOLLOW, and it writes nothing.
    path = f"/proc/self/fd/{locks.descriptor}/{key_hash}.lock"
    mode = stat.S_IMODE(locks.status().st_mode) & 0o666 | _OWN_MODE
    # fallback_to_soft: a marker file instead of flock would outlive a killed builder.
    lock = UnixFileLock(path, mode=mode, fallback_to_soft=False)
    try:
        yield lock
    finally:
        lock.release()


def _acquire(lock: "UnixFileLock", locks: HeldDirectory, status: str, say: Say) -> None:
    from filelock import Timeout

    started = time.monotonic()
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
            return
        except Timeout:
            waited_s = time.monotonic() - started
            say(f"data: waiting for {_holder(locks, status)} ({waited_s:.0f} s so far)")
            wait_s = _WAIT_S


def _unheard(progress: str) -> None:
    """Nobody waits for a lock that we do not hold."""


@contextmanager
def _status(locks: HeldDirectory, name: str) -> Iterator[Say]:
    """Who builds, and how far that is: a file of our own, whatever had its name."""
    try:
        file = locks.create(name)
    except OSError:
        yield _unheard
        return
    with file:
        share(locks, file.fileno())
        _write_status(file.fileno(), "")
        try:
            yield lambda progress: _write_status(file.fileno(), progress)
        finally:
            with suppress(OSError):
                if locks.leads_to(name, os.fstat(file.fileno())):
                    locks.unlink(name)


def _write_status(descriptor: int, progress: str) -> None:
    status = {"pid": os.getpid(), "host": os.uname().nodename, "progress": progress}
    content = json.dumps(status).encode()
    with suppress(OSError):
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))


def _holder(locks: HeldDirectory, name: str) -> str:
    """As far as the file tells: anybody can write into it."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        status = json.loads(locks.read(name, _LONGEST_STATUS))
        who = f"process {status['pid']} on {status['host']}, which prepares this data"
        return printable(f"{who} ({progress})" if (progress := status.get("progress")) else who)
    return "another process, which prepares this data"
