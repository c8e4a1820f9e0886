"""The signals that the supervisor is sent. A handler only records; the loop acts."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Self

from launcher.contain.linux import signalfd
from model_check.utils.requests import TO_FORWARD

_ALWAYS_OURS = (signal.SIGTERM, *TO_FORWARD, signal.SIGCHLD, signal.SIGCONT)
_OURS_UNLESS_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""Our parent may have ignored them on purpose (nohup, a background job): then they stay ignored, by
us and by the workers."""


def answered() -> list[signal.Signals]:
    """The signals that a launcher answers."""
    kept = [s for s in _OURS_UNLESS_IGNORED if signal.getsignal(s) is not signal.SIG_IGN]
    return [*_ALWAYS_OURS, *kept]


class SignalInbox:
    """While entered, signals are recorded and make `fd` readable; on exit all handlers, the wake-up
    descriptor and the mask are as before. For the main thread.

    The wake-up descriptor alone is the record: it gets one byte for each signal, in their order.
    Python calls the handlers later, by number, and once for a signal that came twice meanwhile.

    SIGTSTP has no handler. It is blocked, so it stays pending until `stop`. The kernel takes it
    back when a SIGCONT comes before that.
    """

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[signal.Signals, signal._HANDLER] = {}
        self.stop_fd: int | None = None
        """Readable while we are asked to stop; None: our parent ignored SIGTSTP."""

    def __enter__(self) -> Self:
        self._wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # CHLD too: if we inherit it ignored, the kernel throws our children's exit codes away.
        for signum in answered():
            self._handlers[signum] = signal.signal(signum, _do_nothing)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self.stop_fd = signalfd(signal.SIGTSTP)
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
        return self

    def shut(self) -> None:
        """Record no more: a signal that comes from now on finds the mask as it was before. `take`
        gives what came until then."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def __exit__(self, *_: object) -> None:
        self.shut()
        for signum, handler in self._handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        for fd in (self.fd, self._writer, self.stop_fd):
            if fd is not None:
                os.close(fd)

    def take(self) -> list[signal.Signals]:
        """The signals since the last call, in order, without those of other handlers."""
        arrived = bytearray()
        with suppress(BlockingIOError):
            while chunk := os.read(self.fd, 4096):
                arrived += chunk
        return [s for s in map(signal.Signals, arrived) if s in self._handlers]

    def stop(self) -> None:
        """Act on a pending SIGTSTP as every program does: this process stops until it is
        continued."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTSTP,))  # here we stop
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))

    def discard_stop(self) -> None:
        """Go on, as if no SIGTSTP had come."""
        signal.sigtimedwait((signal.SIGTSTP,), 0)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python writes the byte only for a signal that has a handler."""
