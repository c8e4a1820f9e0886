"""One builder at a time, and the others told whom they wait for.

The lock saves work, nothing else (`publish` makes the cache correct). Where it cannot be had at
all, builders race. Lock files are never deleted: a second holder could then lock a second file of
the same name.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from io import BufferedWriter
from pathlib import Path

from model_check.data.read.sharing import share, shared_directory
from model_check.utils.held import HeldDirectory
from model_check.utils.words import printable

LOCKS = ".locks"
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
            file = stack.enter_context(_lock_file(locks, key_hash))
            _wait_for(file, lambda: _holder(locks, status), say)
            tell = stack.enter_context(_status(locks, status))
        except OSError as error:  # a kernel, or an NFS, without flock, too
            why = error.strerror or error
            say(f"data: no lock in {root / LOCKS} ({why}): two builders may do the same work")
        yield tell


@contextmanager
def if_idle(root: Path, key_hash: str) -> Iterator[bool]:
    """Hold the lock of one key unless somebody does; whether it is held. Where locks cannot be had
    it is not."""
    with ExitStack() as stack:
        idle = False
        with suppress(OSError):
            locks = stack.enter_context(shared_directory(root, LOCKS))
            idle = _locked(stack.enter_context(_lock_file(locks, key_hash)))
        yield idle


@contextmanager
def _lock_file(locks: HeldDirectory, key_hash: str) -> Iterator[BufferedWriter]:
    """Not locked yet; unlocked at the end. Nothing is ever written to it: another user may have put
    a file there, whose content and rights stay as they are."""
    with _opened(locks, f"{key_hash}.lock") as file:
        try:
            yield file
        finally:
            with suppress(OSError):
                flock(file, LOCK_UN)  # a child that we forked may hold the file open


def _opened(locks: HeldDirectory, name: str) -> BufferedWriter:
    """To write, since NFS locks nothing else."""
    try:
        file = locks.create_first(name)
    except FileExistsError:
        return locks.append(name)
    share(locks, file.fileno())
    return file


def _locked(file: BufferedWriter) -> bool:
    """Whether we hold it now; False: somebody else does."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(file: BufferedWriter, holder: Callable[[], str], say: Say) -> None:
    started = time.monotonic()
    wait_s = _FIRST_WAIT_S
    while not _locked(file):
        waited_s = time.monotonic() - started
        if waited_s >= wait_s:
            say(f"data: waiting for {holder()} ({waited_s:.0f} s so far)")
            wait_s = waited_s + _WAIT_S
        time.sleep(_POLL_S)


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
