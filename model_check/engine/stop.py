"""SIGTERM and SIGINT: while training they are noted and the step is finished; elsewhere they end
the work at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

FINISH_STEP_S = 5.0
"""How long a step may take to finish once its end was asked for."""


class Terminated(BaseException):
    """This process was asked to end by a signal. Not an Exception: nothing may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignal:
    """What was asked for. Install it once, in the main thread."""

    def __init__(self, finish_step_s: float = FINISH_STEP_S) -> None:
        self.finish_step_s = finish_step_s
        self.signum: int | None = None
        self.cut_short = False
        """A step was interrupted wherever it was: a lock that it held stays taken, so nobody may
        wait for other threads any more."""
        self._deferring = False

    @contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """SIGINT stays ignored where it was: a job in a shell's background."""
        wanted = {signal.SIGTERM: self._on_stop, signal.SIGALRM: self._on_alarm}
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            wanted[signal.SIGINT] = self._on_stop
        before = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
        # A notice that the launcher passes on (Slurm's USR1) must not kill, and blame, a worker.
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            before[signum] = signal.signal(signum, signal.SIG_IGN)
        try:
            yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal is only noted: `check` acts on it. A second signal, or a step
        that goes on for `finish_step_s` after the first, is cut short."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def check(self) -> None:
        """Raises Terminated if a signal has come."""
        if self.signum is not None:
            raise Terminated(self.signum)

    def _on_stop(self, signum: int, _frame: FrameType | None) -> None:
        second = self.signum is not None
        self.signum = signum
        if second or not self._deferring:
            self.cut_short |= self._deferring
            raise Terminated(signum)
        # Repeated: one raised inside a destructor or a callback is lost.
        signal.setitimer(signal.ITIMER_REAL, self.finish_step_s, 1.0)

    def _on_alarm(self, _signum: int, _frame: FrameType | None) -> None:
        self.cut_short = True
        self.check()
