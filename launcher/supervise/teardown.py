"""End every process of a run: ask, wait for the grace, kill, and look for those that hid.

A state machine that the supervisor's loop drives: it never waits itself.
"""

import os
import signal
from collections.abc import Callable, Sequence
from enum import Enum

from launcher.contain import processes
from launcher.contain.processes import DEAD, Family, Process
from launcher.supervise.worker import Worker

REAP_S = 5.0
"""After SIGKILL: a process that is alive then can't be killed (state D), and we leave it."""
_LOOK_S = 0.05
"""How soon to look again at strays. When one that is our child dies, SIGCHLD wakes us earlier."""
_MAX_LOOKS = 100
"""In one go, at children that fork and end as quickly as we look; then the loop has its turn."""


class Stage(Enum):
    """How hard we try; it only moves down this list."""

    ASKED = "SIGTERM"
    KILLED = "SIGKILL"
    OVER = "over"


class Teardown:
    """One run's end. `advance` after every wake-up, at the latest at `deadline` (monotonic s)."""

    def __init__(
        self, workers: Sequence[Worker], family: Family, say: Callable[[str], None]
    ) -> None:
        self._workers = [worker for worker in workers if worker.spawned is not None]
        self._groups = {worker.pid for worker in self._workers if worker.pid is not None}
        self._family = family
        self._say = say
        # Living processes of the family that are no workers, by pid.
        self._strays: dict[int, Process] = {}
        # Process group -> when it had its SIGTERM, in clock ticks.
        self._asked: dict[int, int] = {}
        self._until = 0.0
        self.stage = Stage.ASKED
        self.leftovers: tuple[int, ...] = ()
        """Pids that outlived SIGKILL."""

    def begin(self, now: float, grace_s: float) -> None:
        """SIGTERM to all processes, at once."""
        self._until = now + grace_s
        for worker in self._workers:
            worker.stop(signal.SIGTERM)
        self._asked = dict.fromkeys(self._groups, processes.now_ticks())
        self._signal_strays(self._find_strays())

    @property
    def strays(self) -> list[str]:
        """Living processes that workers started and left, by pid and name."""
        return [processes.name_of(pid) for pid in self._strays]

    def kill(self, now: float) -> None:
        """SIGKILL to all processes, now."""
        if self.stage is not Stage.ASKED:
            return
        self.stage = Stage.KILLED
        self._until = now + REAP_S
        self._forget_dead_strays()
        if alive := [*self._alive_workers(), *(f"pid {pid}" for pid in self._strays)]:
            self._say(f"still alive, so SIGKILL: {', '.join(alive)}")
        for worker in self._workers:
            worker.stop(signal.SIGKILL)
        self._signal_strays([*self._strays.values(), *self._find_strays()])

    def advance(self, now: float) -> None:
        """Go on as far as possible without waiting."""
        if self.stage is Stage.OVER:
            return
        is_late = now >= self._until
        is_done = not self._alive_workers() and self._are_all_gone()
        if is_done or (is_late and self.stage is Stage.KILLED):
            self._finish()
        elif is_late:
            self.kill(now)

    def deadline(self, now: float) -> float:
        waits_for_strays = self._strays and not self._alive_workers()
        return min(self._until, now + _LOOK_S) if waits_for_strays else self._until

    def _alive_workers(self) -> list[str]:
        return [worker.name for worker in self._workers if worker.alive]

    def _are_all_gone(self) -> bool:
        """No process of the run in the whole process table, then not even an orphan, dead or
        alive."""
        self._chase_orphans()
        self._forget_dead_strays()
        if not self._strays:
            self._signal_strays(self._find_strays())
        if self._strays:
            return False
        late = self._orphans()
        self._signal_strays(late)
        return not late

    def _orphans(self) -> list[Process]:
        return processes.orphans(self._family, self._groups)

    def _find_strays(self) -> list[Process]:
        found = processes.find(self._family, self._groups)
        return [p for p in found if p.pid not in self._groups]

    def _forget_dead_strays(self) -> None:
        self._strays = {pid: stray for pid, stray in self._strays.items() if _is_alive(stray)}

    def _chase_orphans(self) -> None:
        """Signal the orphans that came back to us, until a look finds no new one: a process that
        forks and ends all the time has another pid by the time that a search of the whole table is
        through."""
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
        """Each gets SIGTERM once, or SIGKILL as often as we look. A whole group at once, also that
        of a dead process, which may have forked: a process of the family made the session, so all
        of the group are of the family."""
        for group in {p.group for p in found if self._is_whole_group_ours(p)} - self._groups:
            if self.stage is Stage.KILLED:
                processes.send_group(group, signal.SIGKILL)
            elif group not in self._asked:
                self._asked[group] = processes.now_ticks()
                processes.send_group(group, signal.SIGTERM, signal.SIGCONT)
        for process in [p for p in found if p.state not in DEAD]:
            # A process that is older than its group's SIGTERM had it already.
            is_late = process.started_ticks >= self._asked.get(process.group, 0)
            if self.stage is Stage.KILLED:
                _send(process, signal.SIGKILL)
            elif is_late and process.pid not in self._strays:
                _send(process, signal.SIGTERM, signal.SIGCONT)
            self._strays[process.pid] = process

    def _is_whole_group_ours(self, process: Process) -> bool:
        return process.group in self._asked or not processes.is_guest(process, self._family)

    def _finish(self) -> None:
        self.stage = Stage.OVER
        for worker in self._workers:  # where the kernel has no list of children, one may be missed
            worker.signal_group(signal.SIGKILL)
        self._forget_dead_strays()
        alive = [worker.pid for worker in self._workers if worker.alive and worker.pid is not None]
        late = [p.pid for p in self._orphans() if p.state not in DEAD]
        self.leftovers = tuple(sorted({*alive, *self._strays, *late}))
        for pid in self.leftovers:
            self._say(f"SIGKILL has no effect on {processes.describe_stuck(pid)}: left behind")


def _is_alive(process: Process) -> bool:
    now = processes.as_now(process)
    return now is not None and now.state not in DEAD


def _send(process: Process, *signals: signal.Signals) -> None:
    try:
        pidfd = processes.hold(process)
    except OSError:  # no descriptor is left: the next look, or SIGKILL to its group, reaches it
        return
    if pidfd is not None:
        processes.send(pidfd, *signals)
        os.close(pidfd)
