"""SIGTERM and SIGINT end the work: during training after the step, elsewhere at once. SIGUSR1 is a
notice: with training.save_on_signal the run ends well, with a checkpoint."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

FINISH_STEP_S = 5.0
"""How long a step may go on after the signal, seconds."""


class Terminated(BaseException):
    """A signal asked this process to end. Not an Exception: no handler may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class EndedEarly(BaseException):
    """This run ended well before its last step, as it was asked to; its text says why. Not an
    Exception, for the reason of Terminated."""


class StopSignal:
    """The signals that came. Install it once, in the main thread."""

    def __init__(self, finish_step_s: float = FINISH_STEP_S) -> None:
        self.finish_step_s = finish_step_s
        self.signum: int | None = None
        self.cut_short = False
        """A step was interrupted at an arbitrary place. A lock that it held stays taken, so waiting
        for another thread may last for ever."""
        self.has_raised = False
        """Terminated was raised. Where a library lost it, another error may follow from that: an
        import that was broken off cannot be repeated."""
        self.notice: int | None = None
        """The signal that asked for an end with a checkpoint: SIGUSR1, or that of
        `take_as_notice`."""
        self._deferring = False
        self._is_heeded = False
        self._also_notice: int | None = None
        self._woken_fd: int | None = None

    @contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """SIGINT stays ignored where it was, as in a job in the background of a shell. A notice
        that was blocked until now counts; on leaving it is blocked again."""
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGALRM: self._on_alarm}
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            handlers[signal.SIGINT] = self._on_stop
        before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        # A notice that the launcher forwards (Slurm's USR1) must not kill a worker, nor blame it.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_notice)
        before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        notices = (signal.SIGUSR1, signal.SIGUSR2)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, notices)
        try:
            with self._woken_by_signals():
                yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Inside, signals end the work. Before, they wait; behind it they end nothing any more: the
        last words of a process must be said."""
        self._is_heeded = True
        try:
            self.check()
            yield
        finally:
            self._is_heeded = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal is only noted, and `check` acts on it. A second signal cuts the
        step short, and so does a step that goes on for `finish_step_s` after the first."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def wait(self, fd: int, time_s: float) -> None:
        """Until `fd` is readable, a signal has come, or the time is over. Also a signal that came
        just before is heard."""
        fds = [fd] if self._woken_fd is None else [fd, self._woken_fd]
        poll = select.poll()
        for each in fds:
            poll.register(each, select.POLLIN)
        ready = [number for number, _ in poll.poll(max(0.0, time_s) * 1000)]
        if self._woken_fd is not None and self._woken_fd in ready:
            os.read(self._woken_fd, 4096)

    @contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """A handler runs between two lines of Python: one that is deferred ends no wait. So each
        signal leaves a byte here."""
        self._woken_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(write_fd)
            os.close(self._woken_fd)
            self._woken_fd = None

    @property
    def notice_name(self) -> str:
        return "request" if self.notice is None else signal.Signals(self.notice).name

    def take_as_notice(self, signum: int) -> None:
        """From now on the first `signum` inside `deferred` is a notice, without a limit for the
        step under way; the second one stops the run as usual."""
        self._also_notice = signum

    def asked(self, on_notice: bool) -> bool:
        """Whether the run must end after this step; `on_notice`: a notice counts."""
        return self.signum is not None or (on_notice and self.notice is not None)

    def check(self) -> None:
        """Raises Terminated if a signal has come."""
        if self.signum is not None:
            self.has_raised = True
            raise Terminated(self.signum)

    def _on_notice(self, signum: int, _frame: FrameType | None) -> None:
        self.notice = self.notice or signum

    def _on_stop(self, signum: int, _frame: FrameType | None) -> None:
        if signum == self._also_notice and self._deferring and self.notice != signum:
            self.notice = signum
            return
        second = self.signum is not None
        self.signum = signum
        if not self._is_heeded:
            return
        if second or not self._deferring:
            self.cut_short |= self._deferring
            self.check()
        # Repeated: an exception raised inside a destructor or a callback is lost.
        signal.setitimer(signal.ITIMER_REAL, self.finish_step_s, 1.0)

    def _on_alarm(self, _signum: int, _frame: FrameType | None) -> None:
        if not self._is_heeded:
            return
        self.cut_short = True
        self.check()
