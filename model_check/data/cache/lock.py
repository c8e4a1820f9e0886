"""One builder at a time for each key. The others wait, and say for which process.

The lock only saves work: `publish` makes the cache correct. Where locks do not work, builders race.
Lock files are never deleted: a second builder could then lock a second file of the same name.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from model_check.data.read.sharing import share, shared_directory
from model_check.utils.held import HeldDirectory
from model_check.utils.lock import try_lock, unlock
from model_check.utils.words import Say, printable

LOCKS = ".locks"
_LONGEST_STATUS = 4096
_FIRST_WAIT_S = 0.2
_WAIT_S = 5.0
_POLL_S = 0.1


@contextmanager
def build_lock(root: Path, key_hash: str, say: Say) -> Iterator[Say]:
    """Hold the lock of one key; says for which living process it waits.

    Yields a function that reports progress to the processes that wait for us.
    """
    with ExitStack() as stack:
        report: Say = _report_to_nobody
        try:
            locks = stack.enter_context(shared_directory(root, LOCKS))
            status = f"{key_hash}.status.json"
            file = stack.enter_context(_lock_file(locks, key_hash))
            _wait_for(file, lambda: _holder(locks, status), say)
            report = stack.enter_context(_status(locks, status))
        # Also a kernel, or an NFS, without flock.
        except OSError as error:
            why = error.strerror or error
            say(f"data: no lock in {root / LOCKS} ({why}): two builders may do the same work")
        yield report


@contextmanager
def if_idle(root: Path, key_hash: str) -> Iterator[bool]:
    """Hold the lock of one key unless another process does; yields whether we hold it. Where locks
    do not work, we do not."""
    with ExitStack() as stack:
        idle = False
        with suppress(OSError):
            locks = stack.enter_context(shared_directory(root, LOCKS))
            idle = try_lock(stack.enter_context(_lock_file(locks, key_hash)).fileno())
        yield idle


@contextmanager
def _lock_file(locks: HeldDirectory, key_hash: str) -> Iterator[BufferedWriter]:
    """Not locked yet; unlocked at the end. Nothing is written to it: the file may be another
    user's, so its content and rights stay as they are."""
    with _opened(locks, f"{key_hash}.lock") as file:
        try:
            yield file
        finally:
            with suppress(OSError):
                unlock(file.fileno())


def _opened(locks: HeldDirectory, name: str) -> BufferedWriter:
    """Opened for writing, without which NFS does not lock."""
    try:
        file = locks.create_first(name)
    except FileExistsError:
        return locks.append(name)
    share(locks, file.fileno())
    return file


def _wait_for(file: BufferedWriter, holder: Callable[[], str], say: Say) -> None:
    started = time.monotonic()
    wait_s = _FIRST_WAIT_S
    while not try_lock(file.fileno()):
        waited_s = time.monotonic() - started
        if waited_s >= wait_s:
            say(f"data: waiting for {holder()} ({waited_s:.0f} s so far)")
            wait_s = waited_s + _WAIT_S
        time.sleep(_POLL_S)


def _report_to_nobody(progress: str) -> None:
    """For a build without a lock: no process waits for it."""


@contextmanager
def _status(locks: HeldDirectory, name: str) -> Iterator[Say]:
    """A file that says which process builds and how far it is: our own, whatever had its name."""
    try:
        file = locks.create(name)
    except OSError:
        yield _report_to_nobody
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
    """What the status file says of the process that builds. Other users can write to it."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        status = json.loads(locks.read(name, _LONGEST_STATUS))
        progress = f" ({status['progress']})" if status.get("progress") else ""
        process = f"process {status['pid']} on {status['host']}"
        return printable(f"{process}, which prepares this data{progress}")
    return "another process, which prepares this data"
