"""One worker of a hung run, asked what it is doing."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from launcher.contain.processes import Process
from launcher.supervise import frames, stacks
from launcher.supervise.worker import Worker

MAX_PY_SPY = 4
"""Processes of one worker that py-spy looks into."""
_MAX_READ = 1 << 20


class Witness:
    """A worker that still runs, and the file that takes its evidence.

    The file begins with what the kernel tells (`threads`), which needs nobody's help. Then a worker
    that offered it is sent its signal; into the Python processes of another, py-spy looks.
    """

    def __init__(self, worker: Worker, path: Path, processes: Sequence[Process]) -> None:
        self.name = worker.spec.name
        self.path = path
        self._worker = worker
        self._processes = processes
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._asked = False
        self._answer_from = 0
        self._seen_bytes = 0

    def ask(self, py_spy: str | None) -> None:
        """Write down what is known, ask for the rest. Raises OSError: the file can't be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o666)
        try:
            os.write(fd, f"{self.name}\n{stacks.describe(self._processes)}\n".encode())
            self._answer_from = self._seen_bytes = os.fstat(fd).st_size
            self._asked = self._worker.ask_for_stacks()
            if not self._asked and py_spy is not None:
                self._send_py_spy(py_spy, fd)
        finally:
            os.close(fd)

    def has_finished(self) -> bool:
        """Whether no more is to be expected, as far as two looks at its file can tell: a dump that
        pauses goes on all the same, until the worker is killed."""
        if any(helper.poll() is None for helper in self._helpers):
            return False
        if not self._asked or not self._worker.alive:
            return True
        try:
            num_bytes = self.path.stat().st_size
        except OSError:  # the run directory is gone
            return True
        has_paused, self._seen_bytes = num_bytes == self._seen_bytes, num_bytes
        return has_paused and num_bytes > self._answer_from

    def finding(self, waited_s: float) -> str:
        """Where it is, in words: its innermost calls, or what else is known."""
        if (calls := frames.innermost(self._answer())) is not None:
            return f"in {calls}"
        state = stacks.state_of(self._worker.pid or 0)
        return f"no answer within {waited_s:.1f} s: {state}" if self._asked else state

    def close(self) -> None:
        """Expect no more."""
        for helper in self._helpers:
            helper.kill()

    def release(self) -> None:
        """Later: let go of the helpers, which have long ended if SIGKILL has any effect on them."""
        for helper in self._helpers:
            if helper.poll() is None:
                helper.returncode = -9  # Popen must not warn that nobody waited

    def _send_py_spy(self, py_spy: str, fd: int) -> None:
        pids = [process.pid for process in self._processes if stacks.is_python(process.pid)]
        for pid in pids[:MAX_PY_SPY]:
            helper = subprocess.Popen(
                (py_spy, "dump", "--pid", str(pid)),
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
            )
            self._helpers.append(helper)

    def _answer(self) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(self._answer_from)
                return file.read(_MAX_READ).decode(errors="replace")
        except OSError:
            return ""
