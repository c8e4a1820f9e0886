"""End every process of a run: ask, wait for the grace, kill, and look for those who hid.

A state machine that the supervisor's loop drives: it never waits itself.
"""

import os
import signal
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from launcher import containment
from launcher.containment import Family, Process
from launcher.worker import Worker

REAP_S = 5.0
"""After SIGKILL: what is alive then can't be killed (state D), and we leave it."""
_BLIND_WAIT_S = 0.05
"""How soon to look again when there was no descriptor left to wait on a process."""


class Stage(Enum):
    """How hard we try; it only moves down this list."""

    ASKED = "SIGTERM"
    KILLED = "SIGKILL"
    OVER = "over"


class Watcher(Protocol):
    """The loop: it wakes when one of these descriptors is readable."""

    def watch(self, fd: int, when_readable: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class Teardown:
    """One run's end. `advance` after every wake-up, at the latest at `deadline` (monotonic s)."""

    def __init__(
        self,
        workers: Sequence[Worker],
        family: Family,
        watcher: Watcher,
        say: Callable[[str], None],
    ) -> None:
        self._workers = [worker for worker in workers if worker.spawned is not None]
        self._groups = {worker.spawned.process.pid for worker in self._workers if worker.spawned}
        self._family = family
        self._watcher = watcher
        self._say = say
        self._strays: dict[int, int] = {}  # pid -> pidfd of those that are no worker
        self._is_blind = False
        self._until = 0.0
        self.stage = Stage.ASKED
        self.leftovers: tuple[int, ...] = ()
        """Pids that outlived SIGKILL."""

    def begin(self, now: float, grace_s: float) -> None:
        """SIGTERM to everybody, at once."""
        self._until = now + grace_s
        for worker in self._workers:
            worker.stop(signal.SIGTERM)
        self._signal_strays(self._find_strays())

    def kill(self, now: float) -> None:
        """SIGKILL to everybody, now."""
        if self.stage is not Stage.ASKED:
            return
        self.stage = Stage.KILLED
        self._until = now + REAP_S
        alive = [worker.spec.name for worker in self._workers if worker.alive]
        if alive or self._strays:
            pids = [f"pid {pid}" for pid in self._strays]
            self._say(f"still alive, so SIGKILL: {', '.join(alive + pids)}")
        for worker in self._workers:
            worker.stop(signal.SIGKILL)
        self._signal_strays(self._find_strays())

    def advance(self, now: float) -> None:
        """Go on as far as possible without waiting."""
        if self.stage is Stage.OVER:
            return
        if not any(worker.alive for worker in self._workers) and not self._strays:
            self._signal_strays(self._find_strays())
            if not self._strays and not self._is_blind:
                self._finish()
                return
        if now >= self._until and self.stage is Stage.ASKED:
            self.kill(now)
        elif now >= self._until:
            self._finish()

    def deadline(self, now: float) -> float:
        return min(self._until, now + _BLIND_WAIT_S) if self._is_blind else self._until

    def _find_strays(self) -> list[Process]:
        found = containment.find(self._family, self._groups)
        return [p for p in found if p.pid not in self._groups]

    def _signal_strays(self, found: Sequence[Process]) -> None:
        """Those that were new get the current stage's signal; they are waited for like workers."""
        self._is_blind = False
        signum = signal.SIGTERM if self.stage is Stage.ASKED else signal.SIGKILL
        for pidfd in self._strays.values():
            if signum is signal.SIGKILL:
                containment.send(pidfd, signum)
        for process in found:
            if process.pid not in self._strays:
                self._adopt(process, signum)

    def _adopt(self, process: Process, signum: signal.Signals) -> None:
        try:
            pidfd = containment.hold(process)
        except OSError:  # EMFILE: no way to wait on it, so signal it by pid and look again soon
            self._is_blind = True
            containment.send_unheld(process, signum)
            return
        if pidfd is None:
            return
        self._strays[process.pid] = pidfd
        containment.send(pidfd, signum, signal.SIGCONT)
        self._watcher.watch(pidfd, lambda: self._drop(process.pid))

    def _drop(self, pid: int) -> None:
        pidfd = self._strays.pop(pid, None)
        if pidfd is not None:
            self._watcher.unwatch(pidfd)
            os.close(pidfd)

    def _finish(self) -> None:
        self.stage = Stage.OVER
        for worker in self._workers:  # a child that forks and ends all the time can be overlooked
            worker.signal_group(signal.SIGKILL)
        alive = [worker.pid for worker in self._workers if worker.alive]
        self.leftovers = tuple(sorted({*filter(None, alive), *self._strays}))
        for pid in self.leftovers:
            self._say(f"SIGKILL has no effect on {containment.describe_stuck(pid)}: left behind")
        for pid in list(self._strays):
            self._drop(pid)
