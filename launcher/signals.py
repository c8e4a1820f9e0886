"""The signals that the supervisor is sent. A handler only records; the loop acts."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""SIGXCPU: the CPU time that a batch system or `ulimit -t` grants is used up."""
IMPATIENT = (signal.SIGINT, signal.SIGQUIT)
"""From a person at a terminal: the second one kills at once."""
TO_FORWARD = (signal.SIGUSR1, signal.SIGUSR2)
REQUESTS = (*TO_STOP, *TO_FORWARD)
"""What asks a program to end, or to report. A whole job may be sent it (`scancel`, `systemctl
stop`): it is the supervisor's to answer."""
_ALWAYS_OURS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_OURS_UNLESS_IGNORED = (
    *(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU),
    signal.SIGTSTP,
)
"""Whoever started us ignored them on purpose (nohup, a background job): they stay ignored, by us
and by the workers."""
_CONTINUED = signal.SIGCONT


class SignalInbox:
    """While entered, signals are recorded and make `fileno()` readable; on exit all handlers, the
    wake-up descriptor and the mask are as before. For the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._received: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        kept = [s for s in _OURS_UNLESS_IGNORED if signal.getsignal(s) is not signal.SIG_IGN]
        # CHLD too: inherited as ignored, it makes the kernel throw our children's exit codes away.
        for signum in (*_ALWAYS_OURS, *kept, _CONTINUED):
            self._handlers[signum] = signal.signal(signum, self._record)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for signum, handler in self._handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> list[signal.Signals]:
        """What was received since the last call, in order; a stop that was taken back by a later
        CONT is left out."""
        arrived = bytearray()
        try:
            while chunk := os.read(self.fileno(), 4096):
                arrived += chunk
        except BlockingIOError:
            received, self._received = self._received, []
            return settled(in_order(received, bytes(arrived)))
        return []

    def stop(self) -> None:
        """Stop this process by SIGTSTP's default action, until it is continued: the kernel discards
        that where nobody could continue us. A CONT since the last `take` has taken it back."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # waits, and a CONT from now on discards it
        if _CONTINUED in self._received:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # discards it, too
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTSTP,))  # here we stop
        signal.signal(signal.SIGTSTP, self._record)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(signum))


@contextmanager
def requests_held() -> Iterator[None]:
    """A helper that is started inside keeps requests blocked: none kills it before it can ignore
    them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def in_order(received: Sequence[signal.Signals], arrived: bytes) -> list[signal.Signals]:
    """`received`, as `arrived` has them: of signals that came together Python calls the handlers by
    number, but the wake-up descriptor got them as they came (when full it loses some)."""
    left = Counter(received)
    ordered = []
    for signum in map(signal.Signals, arrived):
        if left[signum] > 0:
            left[signum] -= 1
            ordered.append(signum)
    return ordered + list(left.elements())


def settled(received: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Without the stops that a later CONT has taken back: whoever stopped then would stay so."""
    went_on = max((i for i, s in enumerate(received) if s == _CONTINUED), default=-1)
    return [s for i, s in enumerate(received) if s != signal.SIGTSTP or i > went_on]
