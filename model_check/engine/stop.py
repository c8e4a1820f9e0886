"""SIGTERM and SIGINT: while training they are noted and the step is finished; elsewhere they end
the work at once. SIGUSR1 is a notice: the run may end well, with a checkpoint, if it is set so."""

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


class EndedEarly(BaseException):
    """This run ended well without training all its steps, because that was asked for; its text says
    why. Not an Exception, as Terminated."""


class StopSignal:
    """What was asked for. Install it once, in the main thread."""

    def __init__(self, finish_step_s: float = FINISH_STEP_S) -> None:
        self.finish_step_s = finish_step_s
        self.signum: int | None = None
        self.cut_short = False
        """A step was interrupted wherever it was: a lock that it held stays taken, so nobody may
        wait for other threads any more."""
        self.notice: int | None = None
        """What asked for an end with a checkpoint: SIGUSR1, or what `take_as_notice` names."""
        self._deferring = False
        self._also_notice: int | None = None

    @contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """SIGINT stays ignored where it was: a job in a shell's background. A notice that was
        blocked until now counts; on leaving it is blocked again."""
        wanted = {signal.SIGTERM: self._on_stop, signal.SIGALRM: self._on_alarm}
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            wanted[signal.SIGINT] = self._on_stop
        before = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
        # A notice that the launcher passes on (Slurm's USR1) must not kill, and blame, a worker.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_notice)
        before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        notices = (signal.SIGUSR1, signal.SIGUSR2)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, notices)
        try:
            yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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

    @property
    def notice_name(self) -> str:
        return "request" if self.notice is None else signal.Signals(self.notice).name

    def take_as_notice(self, signum: int) -> None:
        """From now on, while deferring, the first `signum` is a notice, with no limit on the step
        that is under way; the second stops as ever."""
        self._also_notice = signum

    def asked(self, on_notice: bool) -> bool:
        """Whether the run shall end after this step; `on_notice`: a notice counts."""
        return self.signum is not None or (on_notice and self.notice is not None)

    def check(self) -> None:
        """Raises Terminated if a signal has come."""
        if self.signum is not None:
            raise Terminated(self.signum)

    def _on_notice(self, signum: int, _frame: FrameType | None) -> None:
        self.notice = self.notice or signum

    def _on_stop(self, signum: int, _frame: FrameType | None) -> None:
        if signum == self._also_notice and self._deferring and self.notice != signum:
            self.notice = signum
            return
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
