"""One builder at a time, and the others told whom they wait for.

The lock saves work, nothing else (`publish` makes the cache correct). Where it cannot be had at
all, builders race. Lock files are never deleted: a second holder could then lock a second file of
the same name.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model_check.data.sharing import make_shared, share

if TYPE_CHECKING:
    from filelock import UnixFileLock

LOCKS = ".locks"
_SHARED_MODE = 0o664
_FIRST_WAIT_S = 0.2
_WAIT_S = 5.0
_POLL_S = 0.1

Say = Callable[[str], None]


@contextmanager
def build_lock(root: Path, key_hash: str, say: Say) -> Iterator[Say]:
    """Hold the lock of one key; waits, with words, as long as a living process holds it.

    Yields what tells those who wait how far the build is.
    """
    from filelock import UnixFileLock  # only builders lock, never who finds a prepared cache

    directory = root / LOCKS
    status = directory / f"{key_hash}.status.json"
    # fallback_to_soft: a marker file instead of flock would outlive a killed builder.
    lock = UnixFileLock(directory / f"{key_hash}.lock", mode=_SHARED_MODE, fallback_to_soft=False)
    try:
        make_shared(root, directory)
        _acquire(lock, status, say)
        share(root, Path(lock.lock_file))
    except (OSError, NotImplementedError) as error:  # the latter: a kernel without flock
        why = getattr(error, "strerror", None) or error
        say(f"data: no lock in {directory} ({why}): two builders may do the same work")
    try:
        if lock.is_locked:
            _write_status(status, "")
            share(root, status)
        yield lambda progress: _write_status(status, progress) if lock.is_locked else None
    finally:
        if lock.is_locked:
            with suppress(OSError):
                status.unlink()
            lock.release()


@contextmanager
def if_idle(root: Path, key_hash: str) -> Iterator[bool]:
    """Hold the lock of one key unless somebody does; whether it is held. Where locks cannot be had
    it is not."""
    from filelock import Timeout, UnixFileLock

    path = root / LOCKS / f"{key_hash}.lock"
    lock = UnixFileLock(path, mode=_SHARED_MODE, fallback_to_soft=False)
    try:
        make_shared(root, path.parent)
        lock.acquire(timeout=0)
    except (OSError, Timeout, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _acquire(lock: "UnixFileLock", status: Path, say: Say) -> None:
    from filelock import Timeout

    started = time.monotonic()
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
            return
        except Timeout:
            say(f"data: waiting for {_holder(status)} ({time.monotonic() - started:.0f} s so far)")
            wait_s = _WAIT_S


def _write_status(path: Path, progress: str) -> None:
    status = {"pid": os.getpid(), "host": os.uname().nodename, "progress": progress}
    with suppress(OSError):
        path.write_text(json.dumps(status))


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        status = json.loads(path.read_bytes())
        who = f"process {status['pid']} on {status['host']}, which prepares this data"
        return f"{who} ({progress})" if (progress := status.get("progress")) else who
    return "another process, which prepares this data"
