"""On a signal from the supervisor, this process writes the Python stack of every thread to a file:
the worker's part of the evidence of a hang."""

import faulthandler
import os
import signal
from pathlib import Path

from model_check.events import STACKS_SIGNAL

SIGNAL = signal.SIGRTMIN + 7
"""A real-time signal: USR1 and USR2 come from outside, and belong to their senders."""


def offer_stacks(path: Path | None) -> dict[str, int]:
    """Have this process append its stacks to `path` at every SIGNAL, whatever it hangs in; returns
    what to tell the supervisor, which otherwise never sends it. Nothing when there is no `path`, or
    it can't be opened.

    A file of their own: the log must stay exactly what the worker wrote, and a pipe that nobody
    empties may be what it hangs in. The handler is C: it needs no interpreter that still turns.
    """
    if path is None:
        return {}
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o666)  # open for as long as the process lives
    except OSError:
        return {}
    faulthandler.register(SIGNAL, file=fd, all_threads=True)
    return {STACKS_SIGNAL: SIGNAL}
