"""What all workers of a hung run are doing, saved before anybody is stopped.

A state machine that the supervisor's loop drives, as the teardown is: it never waits itself, and
is over after ANSWER_S at the latest, whoever has not answered.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from launcher.contain import processes
from launcher.supervise.witness import Witness
from launcher.supervise.worker import Worker

ANSWER_S = 2.0
_LOOK_S = 0.05
"""How often to see whether the files still grow: nothing tells the end of a dump."""


class Inquest:
    """`begin`; `advance` after every wake-up, at the latest at `deadline` (monotonic seconds);
    `close` when it is over or nobody can wait for it, `release` at the end of the run."""

    def __init__(self, workers: Sequence[Worker], say: Callable[[str], None]) -> None:
        table = processes.process_table()
        self._witnesses = [
            Witness(worker, path, [p for p in table if worker.pid in (p.pid, p.group, p.session)])
            for worker in workers
            if worker.alive and (path := worker.spec.stacks_path) is not None
        ]
        self._say = say
        self._began = 0.0
        self._next_look = 0.0
        self.is_over = False
        self.findings: dict[str, str] = {}
        """Worker -> where it is, in words, when it is over."""
        self.paths: dict[str, str] = {}
        """Worker -> the file that tells it whole."""

    def begin(self, now: float) -> None:
        """Ask everybody, at once."""
        self._began, self._next_look = now, now + _LOOK_S
        py_spy = find_py_spy()
        for witness in list(self._witnesses):
            try:
                witness.ask(py_spy)
            except OSError as error:
                self._say(f"{witness.name}: its stacks can't be saved in {witness.path}: {error}")
                self._witnesses.remove(witness)

    def advance(self, now: float) -> None:
        """Take another look, if it is time."""
        if self.is_over or now < self._next_look:
            return
        self._next_look = min(now + _LOOK_S, self._began + ANSWER_S)
        finished = [witness.has_finished() for witness in self._witnesses]  # each looks
        if all(finished) or now >= self._began + ANSWER_S:
            self.close(now)

    @property
    def deadline(self) -> float:
        return self._next_look

    def close(self, now: float) -> None:
        """Take what there is. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        for witness in self._witnesses:
            witness.close()
            self.findings[witness.name] = witness.finding(now - self._began)
            self.paths[witness.name] = str(witness.path)

    def release(self) -> None:
        for witness in self._witnesses:
            witness.release()


def find_py_spy() -> str | None:
    """Its program, of this environment or on the PATH; None: it is not installed."""
    here = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join((here, os.environ.get("PATH", ""))))


def forget_empty(workers: Sequence[Worker]) -> None:
    """A worker opens its file when it starts: in a run that did not hang, it is of no use."""
    for worker in workers:
        path = worker.spec.stacks_path
        with suppress(OSError):
            if path is not None and path.stat().st_size == 0:
                path.unlink()
