"""Find every process of a run, however it hid, and signal it without ever hitting a stranger.

Layers: its process group or session, its descent from the supervisor (a subreaper, so orphans
become its children), a tag in its environment. Standard library only: the guardian imports this.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from launcher.contain.linux import pidfd_open, pidfd_send_signal

if TYPE_CHECKING:  # the guardian does without
    from subprocess import Popen

DEAD = "ZXx"
"""States of a process that has ended, whether its parent has reaped it or not."""
_PROC = "/proc"
_INIT = 1


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
    """A process that started earlier is a stranger."""
    ancestor: int | None
    """The supervisor's pid; None: it is dead, so descent from it tells nothing."""
    ancestor_session: int
    spared: frozenset[int]
    """Pids not to find: the guardian, children that the supervisor had before the run."""


def find(family: Family, groups: Collection[int]) -> list[Process]:
    """Every living process of the family. `groups`: the pids of session leaders that we started.

    May miss a process that forks and exits faster than one pass over /proc. `orphans` cannot.
    """
    return members(family, groups, process_table(), lambda pid: is_tagged(pid, family.tag))


def orphans(family: Family, groups: Collection[int]) -> list[Process]:
    """The family's members that became the ancestor's children when their parents ended, and that
    are not reaped yet, dead or alive. Only the ancestor itself may ask.

    Every living process below the ancestor has living parents up to a child of the ancestor, and no
    child leaves the list of children before it is reaped. So when all workers are dead and one look
    at the list finds no orphan, no process is left, however quickly they fork.
    """
    rows = adopted(family, groups)
    if family.ancestor != _INIT:
        return rows
    return [row for row in rows if row.session in groups or is_tagged(row.pid, family.tag)]


def adopted(family: Family, groups: Collection[int]) -> list[Process]:
    """The ancestor's children that it did not start. The first process of a container gets the
    orphans of strangers, too (of `docker exec`)."""
    if family.ancestor is None:
        return []
    started = {*groups, *family.spared}
    rows = [read_process(pid) for pid in children(family.ancestor) if pid not in started]
    return [row for row in rows if row is not None and row.session != family.ancestor_session]


def reap(pid: int) -> bool:
    """Whether nothing is left of this child. By its own pid: no other child's exit code is lost."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:  # reaped by the code that started it
        return True


def members(
    family: Family,
    groups: Collection[int],
    table: Iterable[Process],
    tagged: Callable[[int], bool],
) -> list[Process]:
    """Those of `table` that belong to the family. Pure but for `tagged`, which is slow and so is
    asked last."""
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
    """Whether it descends from one of our workers. Each worker has a session of its own, so a child
    of the supervisor that shares the supervisor's session is something else that this program
    started. An orphan that the first process of a container got may be a stranger's."""
    seen = set()
    while process.ppid != family.ancestor:
        if process.ppid in groups:
            return True
        # Pids can be reused while the table is read: this keeps the chain from being endless.
        seen.add(process.pid)
        parent = by_pid.get(process.ppid)
        if parent is None or parent.pid in seen:
            return False
        process = parent
    if family.ancestor == _INIT or process.session == family.ancestor_session:
        return False
    return process.pid not in family.spared


def is_guest(process: Process, family: Family) -> bool:
    """Whether a member of the family is in a session that is older than the run and started it with
    the family's environment: the other processes of that session are strangers. When its leader is
    dead, as a daemon's is that forked twice, any other process of it tells its age: nobody can
    move into a session."""
    leader = read_process(process.session)
    known = [leader] if leader is not None else process_table()
    session = [row for row in known if row.session == process.session]
    return any(row.started_ticks < family.since_ticks for row in session)


def is_orphaned(group: int) -> bool:
    """Whether no process could continue this process group once it is stopped (POSIX: an orphaned
    one): no member has a parent in another group of its own session, as a shell with job control
    is. A parent that can't be read counts as one."""
    by_pid = {process.pid: process for process in process_table()}
    members = [p for p in by_pid.values() if p.group == group and p.state not in DEAD]
    return bool(members) and not any(_may_continue(by_pid.get(p.ppid), p) for p in members)


def _may_continue(parent: Process | None, child: Process) -> bool:
    if parent is None:
        return child.ppid != 0  # 0: the parent is outside of this container
    return parent.session == child.session and parent.group != child.group


def process_table() -> list[Process]:
    return list(filter(None, map(read_process, listed_pids())))


def now_ticks() -> int:
    """The present, in the ticks of `Process.started_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def began_at() -> float:
    """When this process did, in seconds of `time.monotonic`; a program that took it over by exec
    counts from there, too. Now, where the kernel does not tell."""
    now, row = time.monotonic(), read_process(os.getpid())
    if row is None:
        return now
    return now - (now_ticks() - row.started_ticks) / os.sysconf("SC_CLK_TCK")


def listed_pids() -> list[int]:
    """All processes, the newest first: those may be the ones that end soonest."""
    return sorted(map(int, filter(str.isdigit, os.listdir(_PROC))), reverse=True)


def read_process(pid: int) -> Process | None:
    """Its row; None: there is no such process (any longer)."""
    stat = read_proc(pid, "stat")
    # The name in brackets may hold anything, brackets and blanks included.
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    state, ppid, group, session = fields[:4]
    return Process(pid, state.decode(), int(ppid), int(group), int(session), int(fields[19]))


def as_now(process: Process) -> Process | None:
    """Its row at this moment; None: it is gone, whoever has its pid."""
    now = read_process(process.pid)
    return now if now is not None and now.started_ticks == process.started_ticks else None


def is_tagged(pid: int, tag: str) -> bool:
    """Whether a process of our user carries `tag`; False when it can't be read."""
    with suppress(OSError):
        is_ours = os.stat(f"{_PROC}/{pid}").st_uid == os.geteuid()
        # The tag is random and long: it is never there by accident.
        return is_ours and tag.encode() in read_proc(pid, "environ")
    return False


def hold(process: Process) -> int | None:
    """A pidfd of exactly this process; None: it is gone. Raises OSError (EMFILE)."""
    with suppress(ProcessLookupError):
        pidfd = pidfd_open(process.pid)
        if as_now(process) is not None:
            return pidfd
        os.close(pidfd)
    return None


def send(pidfd: int, *signals: int) -> None:
    """Signal one process; nothing happens when it is gone or another user's."""
    with suppress(ProcessLookupError, PermissionError):
        for signum in signals:
            pidfd_send_signal(pidfd, signum)


def send_unheld(process: Process, signum: signal.Signals) -> None:
    """`send` without a descriptor: a stranger with a reused pid is very unlikely to be hit, but not
    impossible."""
    if as_now(process) is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signum)


def send_group(group: int, *signals: signal.Signals) -> None:
    """Signal a whole process group, if any of it is left. No fork in it escapes: either the child
    is in the group by then, or the fork is undone."""
    # To killpg, 0 means our own group, and 1 every process.
    if group <= _INIT:
        return
    with suppress(ProcessLookupError, PermissionError):
        for signum in signals:
            os.killpg(group, signum)


def wait_for_any(fds: Iterable[int], timeout_ms: float) -> bool:
    """Wait until one of these descriptors is readable, as a pidfd is when its process is dead;
    False: the time was up first. Not by `select`, which takes descriptors below 1024 only: many
    workers take more."""
    waiter = select.poll()
    for fd in fds:
        waiter.register(fd, select.POLLIN)
    return bool(waiter.poll(timeout_ms))


def wait_for_child(child: "Popen[bytes]", timeout_s: float) -> int | None:
    """Its return code, reaped; None: it has not ended within that time. `Popen.wait` with a timeout
    sleeps between looks, up to 50 ms: that was half of the end of a run."""
    if child.returncode is None:
        pidfd = pidfd_open(child.pid)
        try:
            if wait_for_any([pidfd], timeout_s * 1000):
                child.wait()
        finally:
            os.close(pidfd)
    return child.returncode


def children(pid: int) -> list[int]:
    """Direct children, zombies included; empty where the kernel has no list of them."""
    return [int(child) for child in read_proc(pid, f"task/{pid}/children").split()]


def name_of(pid: int) -> str:
    """`pid 4711 (sleep)`."""
    return f"pid {pid} ({read_proc(pid, 'comm').decode(errors='replace').strip() or 'gone'})"


def describe_stuck(pid: int) -> str:
    """`pid 4711 (state D in nfs_wait)`: what is known of a process that SIGKILL did not end."""
    process = read_process(pid)
    state = process.state if process is not None else "gone"
    return f"pid {pid} (state {state}{where_waiting(pid)})"


def where_waiting(pid: int) -> str:
    """` in nfs_wait`: the function of the kernel that it waits in; empty when it does not."""
    where = read_proc(pid, "wchan").decode(errors="replace")
    return "" if where in ("", "0") else f" in {where}"


def read_proc(pid: int, name: str) -> bytes:
    """A file of `/proc/PID`, where the number of a thread will do, too; empty when the process is
    gone, or another user's."""
    try:
        with open(f"{_PROC}/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
