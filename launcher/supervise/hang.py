"""What all workers of a hung run are doing, saved before any of them is stopped.

The supervisor's loop drives it: it never waits itself, and is over after ANSWER_S, even if some
workers have not answered.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.contain import processes
from launcher.contain.processes import Process
from launcher.supervise import stacks
from launcher.supervise.worker import Worker

ANSWER_S = 2.0
"""We wait that long if any worker is asked: nothing tells the end of a dump, and the run was silent
for much longer."""
MAX_PY_SPY = 4
"""Processes of one worker that py-spy looks into."""
_MAX_READ = 1 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class HangEvidence:
    """`begin`; `close` at the `deadline` (monotonic seconds), or earlier when the run must not last
    that long; `release` at the end of the run."""

    def __init__(self, workers: Sequence[Worker], say: Callable[[str], None]) -> None:
        table = processes.process_table()
        self._dumps = [
            StackDump(worker, path, [p for p in table if worker.pid in (p.pid, p.group, p.session)])
            for worker in workers
            if worker.alive and (path := worker.spec.stacks_path) is not None
        ]
        self._say = say
        self._began = 0.0
        self.deadline = 0.0
        self.findings: dict[str, str] = {}
        """Worker -> where it is, in words, once this is closed."""

    def begin(self, now: float) -> None:
        """Ask all workers at once."""
        py_spy = find_py_spy()
        for dump in list(self._dumps):
            try:
                dump.ask(py_spy)
            except OSError as error:
                self._say(f"{dump.name}: its stacks can't be saved in {dump.path}: {error}")
                self._dumps.remove(dump)
        is_asked = any(dump.expects_answer for dump in self._dumps)
        self._began, self.deadline = now, now + (ANSWER_S if is_asked else 0.0)

    def close(self, now: float) -> None:
        """Take what there is."""
        for dump in self._dumps:
            self.findings[dump.name] = dump.close(now - self._began)

    def release(self) -> None:
        for dump in self._dumps:
            dump.release()


class StackDump:
    """What one worker that still runs is doing, and the file that takes it.

    The file begins with what the kernel tells (`stacks`), which the worker need not help with. Then
    a worker that offered it is sent its signal; into the Python processes of another, py-spy looks.
    """

    def __init__(self, worker: Worker, path: Path, processes: Sequence[Process]) -> None:
        self.name = worker.name
        self.path = path
        self._worker = worker
        self._processes = processes
        self._py_spies: list[subprocess.Popen[bytes]] = []
        self._is_asked = False
        self._answer_from = 0

    def ask(self, py_spy: str | None) -> None:
        """Write down what is known, ask for the rest. Raises OSError: the file can't be written."""
        fd = os.open(self.path, _FLAGS, 0o666)
        try:
            os.write(fd, f"{self.name}\n{stacks.describe(self._processes)}\n".encode())
            self._answer_from = os.fstat(fd).st_size
            self._is_asked = self._worker.ask_for_stacks()
            if not self._is_asked and py_spy is not None:
                self._start_py_spy(py_spy, fd)
        finally:
            os.close(fd)

    @property
    def expects_answer(self) -> bool:
        return self._is_asked or bool(self._py_spies)

    def close(self, waited_s: float) -> str:
        """Expect no more. Where the worker is, in words: its innermost calls, or what else is
        known."""
        self._worker.evidence = (str(self.path),)
        for py_spy in self._py_spies:
            py_spy.kill()
        if (calls := stacks.innermost_calls(self._answer())) is not None:
            return f"in {calls}"
        state = stacks.state_of(self._worker.pid or 0)
        return f"no answer within {waited_s:.1f} s: {state}" if self._is_asked else state

    def release(self) -> None:
        """Later: reap py-spy, which has long ended unless SIGKILL has no effect on it."""
        for py_spy in self._py_spies:
            if py_spy.poll() is None:
                py_spy.returncode = -9  # without this, Popen warns that nobody waited

    def _start_py_spy(self, py_spy: str, fd: int) -> None:
        pids = [process.pid for process in self._processes if stacks.is_python(process.pid)]
        for pid in pids[:MAX_PY_SPY]:
            command = (py_spy, "dump", "--pid", str(pid))
            self._py_spies.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd)
            )

    def _answer(self) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(self._answer_from)
                return file.read(_MAX_READ).decode(errors="replace")
        except OSError:
            return ""


def find_py_spy() -> str | None:
    """Its program, of this environment or on the PATH; None: it is not installed."""
    here = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join((here, os.environ.get("PATH", ""))))


def forget_empty(workers: Sequence[Worker]) -> None:
    """A worker opens its file when it starts: in a run that did not hang, the file stays empty."""
    for worker in workers:
        path = worker.spec.stacks_path
        with suppress(OSError):
            if path is not None and path.stat().st_size == 0:
                path.unlink()
