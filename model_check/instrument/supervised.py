"""What the supervisor commands a worker: as SupervisorClient of hooks.lockstep, by plain lines."""

import math
import time
from collections.abc import Callable
from typing import Any

from model_check.instrument.sink import PlainSink
from model_check.utils.wire import BEAT_S

Command = dict[str, Any]


class Supervised:
    """Waits for permits, answers, and stays at its end until nobody needs it."""

    def __init__(
        self,
        sink: PlainSink,
        *,
        is_held: bool,
        tell_vectors: Callable[[int], None],
        keep: Callable[[Command, int], None],
    ) -> None:
        self._sink, self._tell_vectors, self._keep = sink, tell_vectors, keep
        self._permit = -1.0 if is_held else math.inf
        self._num_done = 0
        self._is_finished = False
        self._dumps: list[Command] = []
        self.is_released = False

    def may_begin(self, step: int) -> bool:
        """Serves first."""
        self._serve()
        return not self._is_held or step <= self._permit

    def wait_for_permit(self, step: int) -> None:
        while not (self.may_begin(step) or self.is_released):
            self._wait()

    def tell_done(self, num_done: int) -> None:
        """So many steps are behind the state."""
        self._num_done = num_done

    def finish(self) -> None:
        """No step follows. Returns when nobody needs this worker."""
        self._is_finished = True
        self._sink.emit("finished")
        self._serve()
        while self._is_held and not self.is_released:
            self._wait()

    @property
    def _is_held(self) -> bool:
        return self._permit < math.inf and self._sink.is_open

    def _wait(self) -> None:
        until = time.monotonic() + BEAT_S
        self._serve(BEAT_S)
        if time.monotonic() >= until:
            self._sink.emit("beat")

    def _serve(self, wait_s: float = 0.0) -> None:
        for command in self._sink.commands(wait_s):
            kind = command.get("kind")
            if kind == "credit":
                self._permit = command["step"]
            elif kind == "vectors":
                self._tell_vectors(command["step"])
            elif kind == "dump":
                self._dumps.append(command)
            elif kind == "go":
                self.is_released = True
        num_done = self._num_done
        for dump in [d for d in self._dumps if num_done >= d["step"] or self._is_finished]:
            self._dumps.remove(dump)
            self._keep(dump, num_done)
            self._sink.emit("kept", step=num_done, of_step=dump["of_step"])
