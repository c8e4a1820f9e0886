"""The history, read by a process of its own: one that is long, or on a disk that does not answer,
must not hold up who asks.

`Reading` is the parent's side, `main` the child's. Neither writes anything.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from launcher.contain.processes import wait_for_any
from launcher.history.gpu_history import GpuHistory
from launcher.verdict.past import against
from launcher.verdict.severity import Symptom
from model_check.errors import InternalError, StorageError
from model_check.events import readable
from model_check.utils.child import child_command

_READ_BYTES = 1 << 16


class Held(Struct, frozen=True):
    """What the history holds against GPUs."""

    against: dict[str, Symptom]
    """By UUID."""
    problem: str | None
    """Why it is less than it should be; None: it is not."""


def main(arguments: Sequence[str]) -> None:
    """`PATH`: print a Held as JSON."""
    (path,) = arguments
    history, found, problem = GpuHistory(Path(path)), dict[str, Symptom](), None
    try:
        found = against(history.runs())
        problem = history.lack
    except StorageError as error:
        problem = str(error)
    with os.fdopen(1, "wb") as output:
        output.write(msgspec.json.encode(readable(msgspec.to_builtins(Held(found, problem)))))


class Reading:
    """A history that is being read."""

    def __init__(self, path: Path) -> None:
        """Raises InternalError when no process can be started."""
        self._path = path
        self._began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                child_command("launcher.history.reading", str(path)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            why = f"its reader cannot be started ({error.strerror})"
            raise InternalError(f"{path}: the history was not read: {why}") from error

    def result(self, end: float) -> Held:
        """What was read by `end`, monotonic seconds. Does not wait for a process that cannot be
        killed."""
        try:
            return msgspec.json.decode(self._output(end), type=Held)
        except TimeoutError:
            why = f"was not read within {time.monotonic() - self._began:.0f} s"
        except msgspec.DecodeError:
            why = "was not read: its reader broke"
        finally:
            self._end()
        return Held({}, f"{self._path}: the history {why}")

    def _output(self, end: float) -> bytes:
        """Raises TimeoutError."""
        assert self._process.stdout is not None
        fd, output = self._process.stdout.fileno(), b""
        while wait_for_any([fd], max(0.0, end - time.monotonic()) * 1000):
            if not (data := os.read(fd, _READ_BYTES)):
                return output
            output += data
        raise TimeoutError

    def _end(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        if self._process.poll() is None:
            # It may be stuck in the kernel: Popen must not warn that it still runs.
            self._process.returncode = -signal.SIGKILL
