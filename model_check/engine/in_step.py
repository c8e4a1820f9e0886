"""A worker obeys its supervisor between two steps: it begins no step without credit, tells what it
is asked, and stays at its end until nobody needs it. It never says when: that is for the trainer.
"""

import math
import time
from collections.abc import Callable

from model_check.engine.stop import EndedEarly, StopSignal
from model_check.events import (
    BEAT_S,
    AskVectors,
    Beat,
    Credit,
    Dump,
    EventSink,
    Finished,
    Go,
    Kept,
    Vectors,
)


class InStep:
    """The commands to one worker. One that is not held, and never heard of credit, waits for
    nothing: it trains alone, without equals, or without a supervisor; and when its supervisor is
    gone, it goes on."""

    def __init__(self, sink: EventSink, stop: StopSignal, *, on_notice: bool) -> None:
        """`on_notice`: a notice ends the run, so it ends each wait, too (as any request does)."""
        self.answer: Callable[[int], Vectors] = lambda step: Vectors(step=step)
        """Gives the vectors of a step, empty when it is not known (any more)."""
        self.keep: Callable[[Dump, int], None] = lambda dump, num_done: None
        """Saves the state after so many steps as evidence."""
        self._sink = sink
        self._stop = stop
        self._on_notice = on_notice
        self._credit = -1 if sink.is_held else math.inf
        self._may_go = False
        self.num_done = 0
        """Steps that the state has behind it."""
        self._is_finished = False
        self._dumps: list[Dump] = []
        """What is to be kept, and is not yet: each of another fault."""

    def may_begin(self, step: int) -> bool:
        """Whether step `step` may begin. First, all that was asked meanwhile is answered."""
        self.serve()
        return self._has_credit(step)

    def may_begin_soon(self, step: int) -> bool:
        """Whether it may begin when a command comes, or after BEAT_S."""
        if (fd := self._sink.fd) is not None:
            self._stop.wait(fd, BEAT_S)
        return self.may_begin(step)

    def wait_for_credit(self, step: int) -> None:
        """Until step `step` may begin, or the run is asked to end. Raises EndedEarly where it goes
        on without this worker."""
        self._wait(lambda: self._may_go or self._has_credit(step), self.serve)
        if self._may_go:
            raise EndedEarly("ended early: the run goes on without this worker")

    def tell_finished(self) -> None:
        """No step follows, and all are told."""
        self._is_finished = True
        self._sink.emit(Finished())

    def wait_for_go(self) -> None:
        """Until nobody needs this worker as a witness, or it is asked to end."""
        self._wait(lambda: self._may_go or not self._is_held, self.serve)

    def wait_for_dump(self) -> Dump | None:
        """What is to be kept first, for who keeps it another way; None: nobody asks for it, or this
        worker is asked to end."""
        self._wait(lambda: bool(self._dumps) or self._may_go or not self._is_held, self._hear)
        return min(self._dumps, key=lambda dump: dump.step, default=None)

    def serve(self) -> None:
        """Take what came, answer what was asked, keep what is due; never waits."""
        self._hear()
        self._keep_what_is_due()

    def _hear(self) -> None:
        for command in self._sink.commands():
            match command:
                case Credit(step=step):
                    self._credit = step
                case AskVectors(step=step):
                    self._sink.emit(self.answer(step))
                case Dump():
                    self._dumps.append(command)
                case Go():
                    self._may_go = True

    def _keep_what_is_due(self) -> None:
        num_done = self.num_done
        for dump in [d for d in self._dumps if num_done >= d.step or self._is_finished]:
            self._dumps.remove(dump)
            self.keep(dump, num_done)
            self._sink.emit(Kept(step=num_done, of_step=dump.of_step))

    @property
    def _is_held(self) -> bool:
        return self._credit < math.inf and self._sink.fd is not None

    def _has_credit(self, step: int) -> bool:
        return not self._is_held or step <= self._credit

    def _wait(self, is_over: Callable[[], bool], hear: Callable[[], None]) -> None:
        hear()
        beat_at = time.monotonic() + BEAT_S
        while not (is_over() or self._stop.asked(self._on_notice)):
            assert self._sink.fd is not None, "without a supervisor there is nothing to wait for"
            self._stop.wait(self._sink.fd, beat_at - time.monotonic())
            if time.monotonic() >= beat_at:
                self._sink.emit(Beat())
                beat_at = time.monotonic() + BEAT_S
            hear()
