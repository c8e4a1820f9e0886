"""The file that outlives the run directories: what became of each GPU in each run, a line of JSON a
worker and run.

File and directory are for their user alone, root's too: a cause may quote what a worker wrote, and
run directories are private for that reason.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from io import BufferedReader
from pathlib import Path

import msgspec

from launcher.run_dir import PRIVATE
from launcher.verdict.past import (
    SCHEMA,
    EarlierFaults,
    PastRun,
    device_of,
    earlier_faults,
    past_runs,
)
from launcher.verdict.record import RunRecord
from launcher.verdict.results import RunResult
from model_check.errors import StorageError
from model_check.events import readable
from model_check.utils.held import OTHERS_WRITE, hold_own, make_unlinked
from model_check.utils.lock import try_lock
from model_check.utils.secrets import masked_values

_OF_ROOT = Path("/var/lib")
_NAME = Path("model-check") / "history.jsonl"
_FLAGS = os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o600
_LOCK_S = 5.0
"""An append has the lock for milliseconds: who has it for longer was stopped, or keeps us out."""
_LOCK_PAUSE_S = 0.01
_LONGEST_LINE = 1 << 20
_LARGEST = 1 << 30
"""Bytes of a file that is read, in seconds: two million lines."""


def path_of(setting: str | None, environ: Mapping[str, str]) -> Path | None:
    """Where launch.history_file puts it; None: nowhere."""
    if setting is not None:
        return Path(os.path.abspath(os.path.expanduser(setting))) if setting else None
    if os.geteuid() == 0:
        return _OF_ROOT / _NAME
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # to be ignored, says the XDG Base Directory Specification
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return Path("/", state) / _NAME


class GpuHistory:
    """The history at a path, of which nothing may be there yet. Raises StorageError, in one message
    that says what to do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_unread = 0
        """Lines that `runs` left out: torn, or of a newer version."""

    def runs(self) -> Iterator[PastRun]:
        """The oldest first; no file: none."""
        with _told(self.path, "read"):
            try:
                descriptor = _open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return
            with os.fdopen(descriptor, "rb") as file:
                if os.fstat(descriptor).st_size > _LARGEST:
                    raise OSError(errno.EFBIG, f"larger than {_LARGEST:,} bytes, move it away")
                yield from self._decoded(file)

    def append(self, runs: Sequence[PastRun]) -> None:
        """All of them at once, or none."""
        with _told(self.path, "written"):
            make_unlinked(self.path.parent, PRIVATE)
            descriptor = _open(self.path, os.O_RDWR | os.O_CREAT)
            try:
                _lock(descriptor)
                _append(descriptor, b"".join(map(_line, runs)))
            finally:
                os.close(descriptor)

    @property
    def lack(self) -> str | None:
        """What to tell of lines that were left out; None: none were."""
        if not self.num_unread:
            return None
        return f"{self.path}: {self.num_unread} lines left out: torn, or of a newer version"

    def _decoded(self, file: BufferedReader) -> Iterator[PastRun]:
        for line in iter(partial(file.readline, _LONGEST_LINE), b""):
            if (run := _run(line)) is not None:
                yield run
            elif line.strip():
                self.num_unread += 1


class Memory:
    """What a run asks of the history, and adds to it. Without a history the verdict stands: nothing
    is raised, `problem` tells."""

    def __init__(self, history: GpuHistory, record: RunRecord) -> None:
        self._history, self._record = history, record
        self.faults: dict[str, EarlierFaults] = {}
        """Worker -> what the history holds against it."""
        self.problem: str | None = None
        """Why the history holds less than it should; None: it does not."""

    def recall(self, workers: Sequence[str]) -> dict[str, EarlierFaults]:
        """Of those that have just had a transient fault."""
        record = self._record
        devices = {device_of(record.gpus.get(name, {})): name for name in workers}
        known = {device: name for device, name in devices.items() if device is not None}
        if not known:
            return {}
        try:
            self.faults = earlier_faults(
                known,
                self._history.runs(),
                is_drill=record.drill is not None,
                run_dir=record.run_dir,
            )
            self.problem = self._history.lack
        except StorageError as error:
            self.problem = str(error)
        return self.faults

    def remember(self, result: RunResult) -> None:
        """Add a run that has just ended."""
        try:
            self._history.append(past_runs(result, datetime.now().astimezone()))
        except StorageError as error:
            self.problem = str(error)


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    # A path with a zero byte is a ValueError.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.ELOOP:
            why = "it is a link"
        raise StorageError(
            f"{path} cannot be {what}: {why} (launch.history_file=FILE: another one; empty: none)"
        ) from error


def _open(path: Path, flags: int) -> int:
    """A plain file, no link; in a directory where others may write, our own. Raises OSError."""
    with hold_own(path.parent) as directory:
        descriptor = os.open(path.name, flags | _FLAGS, _MODE, dir_fd=directory.descriptor)
        problem = _problem(directory.status(), os.fstat(descriptor))
    if problem is not None:
        os.close(descriptor)
        raise OSError(errno.EPERM, problem)
    return descriptor


def _problem(directory: os.stat_result, file: os.stat_result) -> str | None:
    is_shared = bool(directory.st_mode & OTHERS_WRITE)
    is_linked = file.st_nlink > 1 and (is_shared or directory.st_uid != file.st_uid)
    if not stat.S_ISREG(file.st_mode):
        return "it is no plain file"
    if is_linked or (is_shared and file.st_uid != os.geteuid()):
        return "another user may have made it"
    return None


def _lock(descriptor: int) -> None:
    """Wait for our turn to append, not for ever. Raises OSError."""
    deadline = time.monotonic() + _LOCK_S
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            raise OSError(errno.EBUSY, "another process keeps it locked")
        time.sleep(_LOCK_PAUSE_S)


def _append(descriptor: int, lines: bytes) -> None:
    """Whole, or nothing. Behind a line that a launcher did not live to end, a new one begins."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        lines = b"\n" + lines
    try:
        if os.write(descriptor, lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _line(run: PastRun) -> bytes:
    return msgspec.json.encode(masked_values(readable(msgspec.to_builtins(run)))) + b"\n"


def _run(line: bytes) -> PastRun | None:
    """None: it is torn, or of another version."""
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    with suppress(ValueError, RecursionError):
        run = msgspec.json.decode(line, type=PastRun)
        return run if run.schema == SCHEMA else None
    return None
