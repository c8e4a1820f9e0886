"""A small process that kills a run's processes when the supervisor dies without a word.

It blocks on a lifeline pipe: the supervisor writes the pid of every worker into it, and `bye` when
all are gone; the end of file without `bye` means that the supervisor was killed. The supervisor's
side is `lifeline`. It also clears the run's cgroup, if there is one, which holds the processes that
nothing else identifies. Standard library only.
"""

import os
import signal
import sys
from collections.abc import Iterable, Iterator

from launcher.contain import cgroup, processes
from launcher.contain.processes import DEAD, Family, Process
from model_check.utils.requests import ignore_requests

BYE = b"bye"
_DEATH_WAIT_MS = 1000
"""A child may be born while we wait for deaths, so we scan again after this at the latest."""
_EMPTY_WAIT_S = 10.0
"""When the supervisor is dead nothing waits for us."""
_MAX_QUIET_SCANS = 50
"""End after so many scans in a row that found nothing: a process that forks and exits all the time
is missed by one scan, but not by all of them."""


def main(arguments: list[str]) -> None:
    """`TAG SINCE_TICKS CGROUP` (its directory, or ``); the lifeline is standard input."""
    tag, since_ticks, directory = arguments
    ignore_requests()
    groups, empty_wait_s = set(), cgroup.EMPTY_WAIT_S
    for line in sys.stdin.buffer:
        if line.strip() == BYE:
            break
        if line.endswith(b"\n"):  # a torn last line is no pid
            groups.add(int(line))
    else:
        empty_wait_s = _EMPTY_WAIT_S
        cgroup.clear(directory, wait_s=0)
        kill_all(Family(tag, int(since_ticks), None, 0, frozenset({os.getpid()})), groups)
    cgroup.clear(directory, empty_wait_s)


def kill_all(family: Family, groups: Iterable[int]) -> None:
    """SIGKILL to every process of the family, until scans of the process table find none.

    Orphans do not become our children here, so a process that forks and exits all the time is often
    gone before we have read its row. One that we catch alive is killed with its group, from which
    no fork escapes.
    """
    groups, num_quiet = set(groups), 0
    while num_quiet < _MAX_QUIET_SCANS:
        pidfds, num_quiet = [], num_quiet + 1
        for row in _scan(family, groups):
            num_quiet = 0
            pidfds += _kill(row, family, groups)
        if pidfds:
            processes.wait_for_any(pidfds, _DEATH_WAIT_MS)
        for pidfd in pidfds:
            os.close(pidfd)


def _scan(family: Family, groups: set[int]) -> Iterator[Process]:
    """Signal all known groups, then yield every living member that one pass over the process table
    finds, as soon as it is read: the newest first."""
    for group in groups:
        processes.send_group(group, signal.SIGKILL)
    present = set()
    for row in filter(None, map(processes.read_process, processes.listed_pids())):
        if row.started_ticks < family.since_ticks:
            continue
        if row.state not in DEAD and _is_ours(row, family, groups):
            yield row
        present |= {row.group, row.session}
    groups &= present  # a number that is gone may soon be a stranger's


def _is_ours(row: Process, family: Family, groups: set[int]) -> bool:
    if row.pid in family.spared:
        return False
    return row.group in groups or row.session in groups or processes.is_tagged(row.pid, family.tag)


def _kill(row: Process, family: Family, groups: set[int]) -> list[int]:
    """SIGKILL to a process with its group, which is added to `groups`; its pidfd, for the caller to
    wait on and to close."""
    if row.session in groups or not processes.is_guest(row, family):
        groups |= {row.group, row.session}
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
