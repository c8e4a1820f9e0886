"""Find every process of a run, however it hid, and signal it without ever hitting a stranger.

Layers: its process group or session, its descent from the supervisor (a subreaper, so that orphans
come back to it), a tag in its environment. Standard library only: the guardian imports this.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from launcher.contain.pidfd import pidfd_open, send_signal

DEAD = "ZXx"
"""States of a process that has ended, whether its parent has taken note or not."""
_PROC = "/proc"
_INIT = 1
_left_behind: set[int] = set()


class Process(NamedTuple):
    """A row of the process table."""

    pid: int
    state: str
    ppid: int
    group: int
    session: int
    started_ticks: int
    """Clock ticks since boot: with the pid, it names a process for good."""


class Family(NamedTuple):
    """What makes a process one of ours."""

    tag: str
    since_ticks: int
    """Whatever started earlier is a stranger."""
    ancestor: int | None
    """The supervisor; None: it is dead, so descent from it tells nothing."""
    ancestor_session: int
    spared: frozenset[int]
    """Not to be found: the guardian, children that the supervisor had before the run."""


def find(family: Family, groups: Collection[int]) -> list[Process]:
    """Every living process of the family. `groups`: the pids of session leaders that we started.

    Of those who fork and end all the time it may miss some; who came back to us is in `orphans`.
    """
    table = process_table(family.since_ticks)
    return members(family, groups, table, lambda pid: is_tagged(pid, family.tag))


def orphans(family: Family, groups: Collection[int]) -> list[Process]:
    """The family's members who came back to the ancestor as their parent ended, and are not reaped
    yet: the dead among them, too. For the ancestor itself only.

    Everybody alive below the ancestor has living parents up to a child of the ancestor's, and no
    child leaves that list before it is reaped. So when all workers are dead and one look at the
    list finds nobody, nobody is left, however quickly they fork.
    """
    rows = adopted(family, groups)
    if family.ancestor != _INIT:
        return rows
    return [row for row in rows if row.session in groups or is_tagged(row.pid, family.tag)]


def adopted(family: Family, groups: Collection[int]) -> list[Process]:
    """The ancestor's children that it did not start. The first process of a container gets orphans
    of strangers, too (of `docker exec`)."""
    if family.ancestor is None:
        return []
    started = {*groups, *family.spared}
    rows = [read_process(pid) for pid in children(family.ancestor) if pid not in started]
    return [row for row in rows if row is not None and row.session != family.ancestor_session]


def reap_adopted(family: Family, groups: Collection[int]) -> None:
    """Let go of dead orphans, and of those whom an earlier run of this process has left behind."""
    for process in adopted(family, groups):
        reap(process.pid)
    _left_behind.difference_update([pid for pid in _left_behind if reap(pid)])


def leave_behind(pids: Iterable[int]) -> None:
    """SIGKILL had no effect on these in time; whenever they are dead, they are ours to reap."""
    _left_behind.update(pids)


def reap(pid: int) -> bool:
    """Whether nothing is left of this child. By its own pid: nobody else's exit code is lost."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:  # reaped by whoever else started it
        return True


def members(
    family: Family,
    groups: Collection[int],
    table: Iterable[Process],
    tagged: Callable[[int], bool],
) -> list[Process]:
    """Those of `table` that belong to the family. Pure but for `tagged`, asked last: it is dear."""
    by_pid = {process.pid: process for process in table}
    strangers = {family.ancestor, *family.spared}
    return [
        process
        for process in by_pid.values()
        if process.state not in DEAD
        and process.pid not in strangers
        and process.started_ticks >= family.since_ticks
        and (
            process.group in groups
            or process.session in groups
            or _descends(process, family, groups, by_pid)
            or tagged(process.pid)
        )
    ]


def _descends(
    process: Process, family: Family, groups: Collection[int], by_pid: dict[int, Process]
) -> bool:
    """Whether it comes from one of our workers. Their sessions are their own, so a child of the
    supervisor that shares the supervisor's session is something else that this program started.
    What came back to the first process of a container may be a stranger's."""
    seen = set()
    while process.ppid != family.ancestor:
        if process.ppid in groups:
            return True
        seen.add(process.pid)  # pids can be reused while the table is read: no endless chain
        parent = by_pid.get(process.ppid)
        if parent is None or parent.pid in seen:
            return False
        process = parent
    if family.ancestor == _INIT or process.session == family.ancestor_session:
        return False
    return process.pid not in family.spared


def is_guest(process: Process, family: Family) -> bool:
    """Whether a member of the family is in a session that is older than the run, which gave him the
    family's environment: whoever else is in it is a stranger."""
    leader = read_process(process.session)
    return leader is not None and leader.started_ticks < family.since_ticks


def is_orphaned(group: int) -> bool:
    """Whether nobody could continue this process group once it is stopped (POSIX: an orphaned one):
    no member has a parent in another group of its own session, as a shell with job control is. A
    parent that can't be read might be one."""
    by_pid = {process.pid: process for process in process_table()}
    members = [p for p in by_pid.values() if p.group == group and p.state not in DEAD]
    return bool(members) and not any(_may_continue(by_pid.get(p.ppid), p) for p in members)


def _may_continue(parent: Process | None, child: Process) -> bool:
    if parent is None:
        return child.ppid != 0  # 0: it is outside of this container
    return parent.session == child.session and parent.group != child.group


def process_table(since_ticks: int = 0) -> list[Process]:
    """All processes that started at `since_ticks` or later."""
    rows = map(read_process, listed_pids())
    return [row for row in rows if row is not None and row.started_ticks >= since_ticks]


def now_ticks() -> int:
    """The present, as `Process.started_ticks` counts."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def listed_pids() -> list[int]:
    """Of all processes, the newest first: they may be the ones that end soonest."""
    return sorted(map(int, filter(str.isdigit, os.listdir(_PROC))), reverse=True)


def read_process(pid: int) -> Process | None:
    """Its row; None: there is no such process (any more)."""
    stat = read_proc(pid, "stat")
    # The name in brackets may hold anything, brackets and blanks included.
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    state, ppid, group, session = fields[:4]
    return Process(pid, state.decode(), int(ppid), int(group), int(session), int(fields[19]))


def is_tagged(pid: int, tag: str) -> bool:
    """Whether a process of our user carries `tag`; False when it can't be read."""
    try:
        if os.stat(f"{_PROC}/{pid}").st_uid != os.geteuid():
            return False
    except OSError:
        return False
    return tag.encode() in read_proc(pid, "environ")  # random and long: never there by accident


def hold(process: Process) -> int | None:
    """A pidfd of exactly this process; None: it is gone. Raises OSError (EMFILE)."""
    try:
        pidfd = pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    now = read_process(process.pid)
    if now is None or now.started_ticks != process.started_ticks:
        os.close(pidfd)
        return None
    return pidfd


def send(pidfd: int, *signals: int) -> None:
    """Signal one process; one that is gone or another user's is left alone."""
    for signum in signals:
        try:
            send_signal(pidfd, signum)
        except (ProcessLookupError, PermissionError):
            return


def send_unheld(process: Process, signum: signal.Signals) -> None:
    """`send` without a descriptor: a reused pid is all but excluded, not quite."""
    now = read_process(process.pid)
    if now is not None and now.started_ticks == process.started_ticks:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signum)


def send_group(group: int, *signals: signal.Signals) -> None:
    """Signal a whole process group, if any of it is left. Nobody who forks in it escapes: either
    the child is in the group by then, or the fork is undone."""
    if group <= _INIT:  # to killpg, 0 means our own group and 1 everybody
        return
    for signum in signals:
        try:
            os.killpg(group, signum)
        except (ProcessLookupError, PermissionError):
            return


def children(pid: int) -> list[int]:
    """Direct children, zombies included; empty where the kernel has no list of them."""
    return [int(child) for child in read_proc(pid, f"task/{pid}/children").split()]


def describe_stuck(pid: int) -> str:
    """`pid 4711 (state D in nfs_wait)`: what there is to say of a process that SIGKILL leaves."""
    process = read_process(pid)
    where = read_proc(pid, "wchan").decode(errors="replace")
    state = process.state if process is not None else "gone"
    return f"pid {pid} (state {state}{f' in {where}' if where not in ('', '0') else ''})"


def read_proc(pid: int, name: str) -> bytes:
    """A file of `/proc/PID`; empty when the process is gone, or another user's."""
    try:
        with open(f"{_PROC}/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""  # it ended meanwhile, or belongs to somebody else
