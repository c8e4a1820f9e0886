"""End every process of a run: ask, wait for the grace, kill, and look for those who hid.

A state machine that the supervisor's loop drives: it never waits itself.
"""

import os
import signal
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from launcher.contain import processes
from launcher.contain.processes import DEAD, Family, Process
from launcher.supervise.worker import Worker

REAP_S = 5.0
"""After SIGKILL: what is alive then can't be killed (state D), and we leave it."""
_BLIND_WAIT_S = 0.05
"""How soon to look again when there was no descriptor left to wait on a process."""
_MAX_LOOKS = 100
"""In one go, at children who fork and end as quickly as we look; then the loop has its turn."""


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
        self._asked: dict[int, int] = {}  # group -> when it had its SIGTERM (ticks)
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
        self._asked = dict.fromkeys(self._groups, processes.now_ticks())
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
        for pidfd in self._strays.values():
            processes.send(pidfd, signal.SIGKILL)
        self._signal_strays(self._find_strays())

    def advance(self, now: float) -> None:
        """Go on as far as possible without waiting."""
        if self.stage is Stage.OVER:
            return
        if not any(worker.alive for worker in self._workers) and self._is_nobody_left():
            self._finish()
            return
        if now >= self._until and self.stage is Stage.ASKED:
            self.kill(now)
        elif now >= self._until:
            self._finish()

    def deadline(self, now: float) -> float:
        return min(self._until, now + _BLIND_WAIT_S) if self._is_blind else self._until

    def _is_nobody_left(self) -> bool:
        """Nobody in the whole process table, then not even an orphan, dead or alive."""
        self._chase_orphans()
        if not self._is_anybody_known:
            self._signal_strays(self._find_strays())
        if not self._is_anybody_known:
            late = self._orphans()
            self._signal_strays(late)
            return not late
        return False

    @property
    def _is_anybody_known(self) -> bool:
        return bool(self._strays) or self._is_blind

    def _orphans(self) -> list[Process]:
        return processes.orphans(self._family, self._groups)

    def _find_strays(self) -> list[Process]:
        found = processes.find(self._family, self._groups)
        return [p for p in found if p.pid not in self._groups]

    def _chase_orphans(self) -> None:
        """Signal who came back to us, until a look finds nobody new: who forks and ends all the
        time is somebody else by the time that a search of the whole table is through."""
        self._is_blind = False
        seen: set[int] = set()
        for _ in range(_MAX_LOOKS):
            found = self._orphans()
            if all(p.pid in seen for p in found):
                return
            self._signal_strays(found)
            seen.update(p.pid for p in found)
            for process in found:
                processes.reap(process.pid)

    def _signal_strays(self, found: Sequence[Process]) -> None:
        """Everybody gets SIGTERM once, or SIGKILL as often as we look; they are waited for like
        workers. A whole group at once: of a session that one of us made, all are of the family."""
        hosts = [p for p in found if not processes.is_guest(p, self._family)]
        for group in {p.group for p in hosts} - self._groups:
            if self.stage is Stage.KILLED:
                processes.send_group(group, signal.SIGKILL)
            elif group not in self._asked:
                self._asked[group] = processes.now_ticks()
                processes.send_group(group, signal.SIGTERM, signal.SIGCONT)
        for process in found:
            if process.pid not in self._strays and process.state not in DEAD:
                self._adopt(process)

    def _adopt(self, process: Process) -> None:
        is_late = process.started_ticks >= self._asked.get(process.group, 0)
        asks = (signal.SIGTERM, signal.SIGCONT) if is_late else ()  # else it was told
        signals = (signal.SIGKILL,) if self.stage is Stage.KILLED else asks
        try:
            pidfd = processes.hold(process)
        except OSError:  # EMFILE: no way to wait on it, so signal it by pid and look again soon
            self._is_blind = True
            for signum in signals:
                processes.send_unheld(process, signum)
            return
        if pidfd is None:
            return
        self._strays[process.pid] = pidfd
        processes.send(pidfd, *signals)
        self._watcher.watch(pidfd, lambda: self._drop(process.pid))

    def _drop(self, pid: int) -> None:
        pidfd = self._strays.pop(pid, None)
        if pidfd is not None:
            self._watcher.unwatch(pidfd)
            os.close(pidfd)

    def _finish(self) -> None:
        self.stage = Stage.OVER
        for worker in self._workers:  # where the kernel has no list of children, one may be missed
            worker.signal_group(signal.SIGKILL)
        alive = [worker.pid for worker in self._workers if worker.alive]
        late = [p.pid for p in self._orphans() if p.state not in DEAD]
        self.leftovers = tuple(sorted({*filter(None, alive), *self._strays, *late}))
        for pid in self.leftovers:
            self._say(f"SIGKILL has no effect on {processes.describe_stuck(pid)}: left behind")
        for pid in list(self._strays):
            self._drop(pid)
