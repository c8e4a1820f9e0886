"""A tiny process that kills a run's processes when the supervisor dies without saying goodbye.

It blocks on a lifeline pipe: the supervisor tells it of every worker, says `bye` when all are gone,
and the end of file means that it was killed. The supervisor's side is `lifeline`.
"""

import os
import select
import signal
import sys

from launcher import containment
from launcher.containment import Family

BYE = b"bye"
_LOOK_AGAIN_MS = 1000


def main(arguments: list[str]) -> None:
    """`TAG SINCE_TICKS`; the lifeline is standard input."""
    tag, since_ticks = arguments
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it must outlive everyone, and ends by itself
    groups = set()
    for line in sys.stdin.buffer:
        if line.strip() == BYE:
            return
        if line.endswith(b"\n"):  # a torn last line is no pid
            groups.add(int(line))
    kill_all(Family(tag, int(since_ticks), None, 0, frozenset({os.getpid()})), groups)


def kill_all(family: Family, groups: set[int]) -> None:
    """SIGKILL to everyone, again and again until nobody is left. Waits for deaths, never polls."""
    for group in groups:
        containment.send_group(group, signal.SIGKILL)
    while found := containment.find(family, groups):
        pidfds = [fd for fd in map(containment.hold, found) if fd is not None]
        for pidfd in pidfds:
            containment.send(pidfd, signal.SIGKILL)
        wait_for_any(pidfds, _LOOK_AGAIN_MS)  # bounded: a child may be born meanwhile
        for pidfd in pidfds:
            os.close(pidfd)


def wait_for_any(pidfds: list[int], timeout_ms: int) -> bool:
    """Wait until one of these processes is dead; False: the time was up first."""
    waiter = select.poll()
    for pidfd in pidfds:
        waiter.register(pidfd, select.POLLIN)
    return bool(waiter.poll(timeout_ms))
