"""A worker stays in step with its replicas: it begins no step without its supervisor's permit,
answers what it is asked, and stays at its end until nobody needs it."""

import math
import time
from collections.abc import Callable

from model_check.engine.results import StepData, StepResult
from model_check.engine.stop import EndedEarly, StopSignal
from model_check.events import (
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
from model_check.hooks.hook import Hook
from model_check.utils.wire import BEAT_S


class SupervisorClient:
    """The worker's side of what its supervisor commands. One that is not held, and never heard of a
    permit, waits for nothing: it trains alone, without replicas, or without a supervisor; and when
    its supervisor is gone, it goes on."""

    def __init__(
        self,
        sink: EventSink,
        stop: StopSignal,
        *,
        on_notice: bool,
        answer: Callable[[int], Vectors] = lambda step: Vectors(step=step),
        keep: Callable[[Dump, int], None] = lambda dump, num_done: None,
    ) -> None:
        """`on_notice`: a notice ends the run, so it ends each wait, too (as any request does).
        `answer`: gives the vectors of a step, empty when it is not known (any more). `keep`: saves
        the state after so many steps as evidence."""
        self._answer, self._keep = answer, keep
        self._sink = sink
        self._stop = stop
        self._on_notice = on_notice
        self._permit = -1 if sink.is_held else math.inf
        self._is_released = False
        self._num_done = 0
        self._is_finished = False
        self._beat_at = time.monotonic()
        """When `check_in` showed a sign of life."""
        self._dumps: list[Dump] = []
        """What is to be kept, and is not yet: each of another fault."""

    def may_begin(self, step: int) -> bool:
        """Whether step `step` may begin. Serves what was asked meanwhile first."""
        self.serve()
        return self._has_permit(step)

    def may_begin_soon(self, step: int) -> bool:
        """Whether it may begin when a command comes, or after BEAT_S."""
        if (fd := self._sink.fd) is not None:
            self._stop.wait(fd, BEAT_S)
        return self.may_begin(step)

    def wait_for_permit(self, step: int) -> None:
        """Wait until step `step` may begin, or the run is asked to end. Raises EndedEarly where it
        goes on without this worker."""
        self._wait(lambda: self._is_released or self._has_permit(step), self.serve)
        if self._is_released:
            raise EndedEarly("ended early: the run goes on without this worker")

    def tell_finished(self) -> None:
        """No step follows, and all are told."""
        self._is_finished = True
        self._sink.emit(Finished())

    def wait_for_release(self) -> None:
        """Wait until nobody needs this worker as a witness, or it is asked to end."""
        self._wait(lambda: self._is_released or not self._is_held, self.serve)

    def wait_for_dump(self) -> Dump | None:
        """Returns the request that comes first, for who keeps the state another way; None where
        nobody asks, or this worker is asked to end."""
        self._wait(lambda: bool(self._dumps) or self._is_released or not self._is_held, self._hear)
        return min(self._dumps, key=lambda dump: dump.step, default=None)

    @property
    def num_done(self) -> int:
        """Steps that the state has behind it."""
        return self._num_done

    def tell_done(self, num_done: int) -> None:
        """So many steps are behind the state."""
        self._num_done = num_done

    def serve(self) -> None:
        """Take what came, answer what was asked, keep what is due; never waits."""
        self._hear()
        self._keep_what_is_due()

    def beat(self) -> None:
        """Serve, and show that this worker, which waits long for others, does not hang."""
        self._sink.emit(Beat())
        self.serve()

    def check_in(self) -> None:
        """Serve, between two pieces of long work, and show from time to time that this worker is
        alive. Raises Terminated if a signal has come."""
        self._stop.check()
        self.serve()
        if time.monotonic() - self._beat_at >= BEAT_S:
            self._beat_at = time.monotonic()
            self._sink.emit(Beat())

    def _hear(self) -> None:
        for command in self._sink.commands():
            match command:
                case Credit(step=step):
                    self._permit = step
                case AskVectors(step=step):
                    self._sink.emit(self._answer(step))
                case Dump():
                    self._dumps.append(command)
                case Go():
                    self._is_released = True

    def _keep_what_is_due(self) -> None:
        num_done = self._num_done
        for dump in [d for d in self._dumps if num_done >= d.step or self._is_finished]:
            self._dumps.remove(dump)
            self._keep(dump, num_done)
            self._sink.emit(Kept(step=num_done, of_step=dump.of_step))

    @property
    def _is_held(self) -> bool:
        return self._permit < math.inf and self._sink.fd is not None

    def _has_permit(self, step: int) -> bool:
        return not self._is_held or step <= self._permit

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


class Lockstep(Hook):
    """Last of the hooks: behind it the next step begins, and the time of its waits counts for no
    step. A GPU keeps the step that is under way while the wait is short, unless the replicas wait
    for that very step."""

    def __init__(
        self,
        client: SupervisorClient,
        start_timing: Callable[[], None],
        *,
        num_steps: int,
        keeps_step: bool,
    ) -> None:
        """`start_timing`: called where a step begins after a wait. `keeps_step`: whether a step may
        be under way during a short wait."""
        self._client, self._start_timing = client, start_timing
        self._num_steps, self._keeps_step = num_steps, keeps_step

    def after_update(self, data: StepData, _result: StepResult) -> None:
        self._client.tell_done(data.step + 1)

    def is_due(self, num_done: int) -> bool:
        if num_done == self._num_steps or self._client.may_begin(num_done):
            return False
        return not (self._keeps_step and self._client.may_begin_soon(num_done))

    def between_steps(self, num_done: int) -> None:
        self._client.wait_for_permit(num_done)
        self._start_timing()

    def on_last_step(self, *, early: bool) -> None:
        if not early:
            self._client.tell_finished()

    def finish(self, _num_done: int, *, early: bool) -> None:
        if not early:
            self._client.wait_for_release()
