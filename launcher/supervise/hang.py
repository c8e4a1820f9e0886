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
from model_check.utils.secrets import masked

ANSWER_S = 2.0
"""We wait that long if any worker is asked: nothing tells the end of a dump, and the run was silent
for much longer."""
MAX_PY_SPY = 4
"""Processes of one worker that py-spy looks into."""
_MAX_READ = 1 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


class HangEvidence:
    """Asks all workers at once. `close` when `advance` says so, or earlier when the run must not
    last that long; `release` at the end of the run. Times are monotonic seconds."""

    def __init__(self, workers: Sequence[Worker], say: Callable[[str], None], now: float) -> None:
        self._dumps: list[StackDump] = []
        table, py_spy = processes.process_table(), find_py_spy()
        for worker in workers:
            if not worker.alive or (path := worker.spec.stacks_path) is None:
                continue
            found = [p for p in table if worker.pid in (p.pid, p.group, p.session)]
            try:
                self._dumps.append(StackDump(worker, path, found, py_spy))
            except OSError as error:
                say(f"{worker.name}: its stacks can't be saved in {path}: {error}")
        is_asked = any(dump.expects_answer for dump in self._dumps)
        self._began = now
        self._dues = [now + ANSWER_S / 2, now + ANSWER_S] if is_asked else [now]

    @property
    def due(self) -> float:
        """When to call `advance` at the latest."""
        return self._dues[0]

    def advance(self, now: float) -> bool:
        """Whether the time to answer is up. When half of it is, we know which threads run."""
        if now >= self.due and len(self._dues) > 1:
            del self._dues[0]
            for dump in self._dumps:
                dump.look_again(now - self._began)
        return now >= self.due

    def close(self, now: float) -> dict[str, str]:
        """Take what there is: worker -> where it is, in words."""
        return {dump.name: dump.close(now - self._began) for dump in self._dumps}

    def release(self) -> None:
        """Later: reap py-spy, which has long ended unless SIGKILL has no effect on it."""
        for py_spy in (py_spy for dump in self._dumps for py_spy in dump.py_spies):
            if py_spy.poll() is None:
                py_spy.returncode = -9  # without this, Popen warns that nobody waited


class StackDump:
    """What one worker that still runs is doing, and the file that takes it.

    The file begins with what the kernel tells (`stacks`), which the worker need not help with. Then
    a worker that offered it is sent its signal; into the Python processes of another, py-spy looks.
    Where the main thread does not run, and another thread does, the signal is sent to that one,
    too: the main thread may only wait for it, or for the GIL.
    """

    def __init__(
        self, worker: Worker, path: Path, found: Sequence[Process], py_spy: str | None
    ) -> None:
        """Write down what is known of the processes `found`, ask for the rest. Raises OSError: the
        file can't be written."""
        self.name = worker.name
        self._worker = worker
        self._path = path
        self.py_spies: list[subprocess.Popen[bytes]] = []
        with open(os.open(path, _FLAGS, 0o666), "wb", buffering=0) as file:
            file.write(f"{self.name}\n{stacks.describe(found)}\n".encode())
            self._answer_from = os.fstat(file.fileno()).st_size
            self._is_asked = worker.ask_for_stacks()
            if not self._is_asked and py_spy is not None:
                self._start_py_spy(py_spy, found, file.fileno())
        self.expects_answer = self._is_asked or bool(self.py_spies)
        self._work = stacks.work_of(worker.pid or 0)
        # Where in the file the answer of the thread that runs begins.
        self._answer_of_running_from = 0
        self._running: int | None = None

    def look_again(self, waited_s: float) -> None:
        """So long after the first look."""
        pid = self._worker.pid or 0
        work = stacks.work_since(self._work, stacks.work_of(pid))
        self._running = stacks.running_thread(pid, work, waited_s)
        if self._is_asked and self._running is not None:
            self._answer_of_running_from = len(self._answer())
            self._worker.ask_for_stacks(self._running)

    def close(self, waited_s: float) -> str:
        """Expect no more. Where the worker is, in words: its innermost calls, or what else is
        known."""
        self._worker.evidence = (str(self._path),)
        for py_spy in self.py_spies:
            py_spy.kill()
        if self.py_spies:
            self._mask()
        text = self._answer()
        # The answer to a second question may be cut off after the first of its threads.
        first = text[: self._answer_of_running_from] or text
        if (calls := stacks.innermost_calls(first)) is not None:
            return self._place(calls)
        state = stacks.state_of(self._worker.pid or 0)
        return f"no answer within {waited_s:.1f} s: {state}" if self._is_asked else state

    def _place(self, main_calls: str) -> str:
        if self._running is None:
            return f"in {main_calls}"
        who, text = stacks.name_of_thread(self._running), self._answer()
        calls = stacks.current_calls(text[self._answer_of_running_from :])
        if not self._answer_of_running_from or calls is None:
            return f"in {main_calls}, while {who} runs"
        return f"in {calls}, where {who} runs; its main thread is in {main_calls}"

    def _start_py_spy(self, py_spy: str, found: Sequence[Process], fd: int) -> None:
        pids = [process.pid for process in found if stacks.is_python(process.pid)]
        for pid in pids[:MAX_PY_SPY]:
            command = (py_spy, "dump", "--pid", str(pid))
            self.py_spies.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd)
            )

    def _mask(self) -> None:
        """py-spy quotes the command lines."""
        with suppress(OSError), self._path.open("r+b") as file:
            text = masked(file.read().decode(errors="replace"))
            file.seek(0)
            file.truncate()
            file.write(text.encode(errors="backslashreplace"))

    def _answer(self) -> str:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._answer_from)
            return file.read(_MAX_READ).decode(errors="replace")
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
