"""A tiny process that kills a run's processes when the supervisor dies without saying goodbye.

It blocks on a lifeline pipe: the supervisor tells it of every worker, says `bye` when all are gone,
and the end of file means that it was killed. The supervisor's side is `lifeline`. Where it may make
a cgroup, it puts the workers into it: that holds those, too, whom nothing else would tell as ours.
"""

import os
import select
import signal
import sys

from launcher.contain import cgroup, processes
from launcher.contain.processes import DEAD, Family, Process
from model_check.utils.requests import REQUESTS

BYE = b"bye"
_LOOK_AGAIN_MS = 1000
_EMPTY_WAIT_S = 10.0
"""When the supervisor is dead nobody waits for us."""
_MAX_BLANK_LOOKS = 50
"""In a row, that found nobody and yet prove nothing: strangers come and go, too."""


def main(arguments: list[str]) -> None:
    """`TAG SINCE_TICKS SUPERVISOR_PID`; the lifeline is standard input."""
    tag, since_ticks, supervisor = arguments[0], int(arguments[1]), int(arguments[2])
    ignore_requests()  # it must outlive everyone, and ends by itself
    groups, is_orphaned = set(), False
    shared = cgroup.make(cgroup.name_for(tag))
    for line in sys.stdin.buffer:
        if line.strip() == BYE:
            break
        if line.endswith(b"\n"):  # a torn last line is no pid
            groups.add(int(line))
            if shared is not None and is_worker(int(line), supervisor, since_ticks):
                shared.add(int(line))
    else:
        is_orphaned = True
        if shared is not None:
            shared.kill()
        kill_all(Family(tag, since_ticks, None, 0, frozenset({os.getpid()})), groups)
    if shared is not None:
        shared.remove(_EMPTY_WAIT_S if is_orphaned else cgroup.EMPTY_WAIT_S)


def ignore_requests() -> None:
    """Those that came during the start are blocked (`requests_held`), and go with this."""
    for signum in REQUESTS:
        signal.signal(signum, signal.SIG_IGN)


def is_worker(pid: int, supervisor: int, since_ticks: int) -> bool:
    """Whether this is a worker still: when we read of him late he may be gone, and his number a
    stranger's."""
    row = processes.read_process(pid)
    if row is None or row.started_ticks < since_ticks:
        return False
    return row.ppid == supervisor and row.session == pid


def kill_all(family: Family, groups: set[int]) -> None:
    """SIGKILL to everyone, again and again until nobody is left. Waits for deaths, never polls."""
    hunt = Hunt(family, groups)
    num_blank = 0
    while num_blank < _MAX_BLANK_LOOKS:
        pidfds = hunt.look()
        if not pidfds and hunt.saw_everybody:
            return
        num_blank = 0 if pidfds else num_blank + 1
        if pidfds:
            wait_for_any(pidfds, _LOOK_AGAIN_MS)  # bounded: a child may be born meanwhile
        for pidfd in pidfds:
            os.close(pidfd)


class Hunt:
    """Looks for members of the family, each of which kills those whom it finds.

    Nobody comes back to us here, so who forks and ends all the time is often gone before we have
    read about him. One that we catch alive is killed with his group, from which no fork escapes.
    """

    def __init__(self, family: Family, groups: set[int]) -> None:
        self._family = family
        self._groups = set(groups)
        self._dead: set[tuple[int, int]] = set()
        self.saw_everybody = False
        """Nobody ended between being listed and being read, so nobody had a child that was not
        listed: what the last look did not find is not there."""

    def look(self) -> list[int]:
        """Kill whom one look at the process table finds: their pidfds, for the caller to close."""
        for group in self._groups:
            processes.send_group(group, signal.SIGKILL)
        pidfds, dead, num_gone, groups = [], set(), 0, set()
        for pid in processes.listed_pids():
            row = processes.read_process(pid)
            if row is not None and row.started_ticks < self._family.since_ticks:
                continue
            if row is not None and row.state not in DEAD and self._is_ours(row):
                pidfds += self._kill(row)
            elif (row := processes.read_process(pid)) is None:
                num_gone += 1
            elif row.state in DEAD:
                dead.add((row.pid, row.started_ticks))
            if row is not None:
                groups |= {row.group, row.session}
        self.saw_everybody = not num_gone and dead <= self._dead
        self._dead = dead
        self._groups &= groups  # the number of one that is gone may soon be a stranger's
        return pidfds

    def _is_ours(self, row: Process) -> bool:
        if row.pid in self._family.spared:
            return False
        is_known = row.group in self._groups or row.session in self._groups
        return is_known or processes.is_tagged(row.pid, self._family.tag)

    def _kill(self, row: Process) -> list[int]:
        if not processes.is_guest(row, self._family):
            self._groups |= {row.group, row.session}
            processes.send_group(row.group, signal.SIGKILL)
        try:
            pidfd = processes.hold(row)
        except OSError:  # EMFILE: there are more of them than descriptors
            processes.send_unheld(row, signal.SIGKILL)
            return []
        if pidfd is None:
            return []
        processes.send(pidfd, signal.SIGKILL)
        return [pidfd]


def wait_for_any(pidfds: list[int], timeout_ms: int) -> bool:
    """Wait until one of these processes is dead; False: the time was up first."""
    waiter = select.poll()
    for pidfd in pidfds:
        waiter.register(pidfd, select.POLLIN)
    return bool(waiter.poll(timeout_ms))
