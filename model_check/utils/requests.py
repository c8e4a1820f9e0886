"""Signals that ask a program to end, or to report: to the launcher, a worker, or a whole job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from model_check.errors import EXIT_SIGNAL_BASE, exit_code_of

TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""SIGXCPU: the CPU time that a batch system or `ulimit -t` grants is used up."""

IMPATIENT = (signal.SIGINT, signal.SIGQUIT)
"""From a person at a terminal: the second one kills at once."""

TO_FORWARD = (signal.SIGUSR1, signal.SIGUSR2)

REQUESTS = (*TO_STOP, *TO_FORWARD)
"""What asks a program to end, or to report. A whole job may be sent it (`scancel`, `systemctl
stop`): it is the supervisor's to answer."""


@contextmanager
def requests_held() -> Iterator[None]:
    """A helper that is started inside begins with requests blocked: none kills it before it can
    ignore them."""
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
    """The request that a process which ended with `code` seems to have followed: by its default
    action (-N), or in a handler (128+N)."""
    signum = exit_code_of(code) - EXIT_SIGNAL_BASE
    return signal.Signals(signum) if signum in REQUESTS else None
