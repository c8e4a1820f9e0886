"""Requests: signals that ask a program to end or to report. They reach the launcher, a worker, or
every process of a job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from model_check.errors import EXIT_SIGNAL_BASE, exit_code_of

TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""SIGXCPU: the process has used up the CPU time that a batch system or `ulimit -t` grants."""

IMPATIENT = (signal.SIGINT, signal.SIGQUIT)
"""A person at a terminal sends these: the second one kills at once."""

TO_FORWARD = (signal.SIGUSR1, signal.SIGUSR2)

REQUESTS = (*TO_STOP, *TO_FORWARD)
"""Every request. A batch system may send one to every process of a job (`scancel`, `systemctl
stop`): only the supervisor answers it."""


@contextmanager
def requests_held() -> Iterator[None]:
    """A helper process that is started inside begins with requests blocked, so that none kills it
    before it can ignore them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_requests() -> None:
    """For a helper that ends by itself, after the processes that the requests are meant for. Those
    that came during its start are blocked (`requests_held`), and vanish with this."""
    for signum in REQUESTS:
        signal.signal(signum, signal.SIG_IGN)


def request_of(code: int) -> signal.Signals | None:
    """The request that `code` (of Popen, or an exit code) points to: the process died of its
    default action (-N), or its handler exited with 128+N. None: it points to no request."""
    signum = exit_code_of(code) - EXIT_SIGNAL_BASE
    return signal.Signals(signum) if signum in REQUESTS else None
