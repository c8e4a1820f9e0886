"""Find every process of a run, however it hid, and signal it without ever hitting a stranger.

Layers: its process group or session, its descent from the supervisor (a subreaper, so that orphans
come back to it), a tag in its environment. Standard library only: the guardian imports this.
"""

import os
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

_PROC = "/proc"


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
    """Every living process of the family. `groups`: the pids of session leaders that we started."""
    table = process_table(family.since_ticks)
    return members(family, groups, table, lambda pid: is_tagged(pid, family.tag))


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
        if process.state not in "ZXx"
        and process.pid not in strangers
        and process.started_ticks >= family.since_ticks
        and (
            process.group in groups
            or process.session in groups
            or _descends(process, family, by_pid)
            or tagged(process.pid)
        )
    ]


def _descends(process: Process, family: Family, by_pid: dict[int, Process]) -> bool:
    """Whether it comes from one of our workers. Their sessions are their own, so a child of the
    supervisor that shares the supervisor's session is something else that this program started."""
    seen = set()
    while process.ppid != family.ancestor:
        seen.add(process.pid)  # pids can be reused while the table is read: no endless chain
        parent = by_pid.get(process.ppid)
        if parent is None or parent.pid in seen:
            return False
        process = parent
    return process.pid not in family.spared and process.session != family.ancestor_session


def process_table(since_ticks: int = 0) -> list[Process]:
    """All processes that started at `since_ticks` or later."""
    rows = [read_process(int(name)) for name in os.listdir(_PROC) if name.isdigit()]
    return [row for row in rows if row is not None and row.started_ticks >= since_ticks]


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
        pidfd = os.pidfd_open(process.pid)
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
            signal.pidfd_send_signal(pidfd, signum)
        except (ProcessLookupError, PermissionError):
            return


def send_unheld(process: Process, signum: signal.Signals) -> None:
    """`send` without a descriptor: a reused pid is all but excluded, not quite."""
    now = read_process(process.pid)
    if now is not None and now.started_ticks == process.started_ticks:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signum)


def send_group(group: int, *signals: signal.Signals) -> None:
    """Signal a whole process group, if any of it is left."""
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
