"""A selector whose ready descriptors are served in order of urgency."""

import select
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

_Key = selectors.SelectorKey
MAX_WAIT_S = 3600.0
"""epoll counts milliseconds in an int: a longer wait would overflow it."""
_LOOK_EVERY_S = 0.001
"""Between two looks for a death while output is read: 64 full pipes take 30 ms."""


class Urgency(IntEnum):
    """Which descriptors are served first within one wake-up: output must not delay a death."""

    SIGNAL = 0
    DEATH = 1
    EVENT = 2
    OUTPUT = 3


class Loop:
    """Descriptors and what to do when they are readable. Equal urgencies keep the kernel's order,
    which is the order in which they became ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.EpollSelector()
        # All but output: what ends a pause.
        self._urgent = select.poll()

    def watch(
        self, fd: int, when_readable: Callable[[], None], urgency: Urgency = Urgency.DEATH
    ) -> None:
        self._selector.register(fd, selectors.EVENT_READ, (urgency, when_readable))
        if urgency is not Urgency.OUTPUT:
            self._urgent.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Before `fd` is closed; harmless when it is not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
            with suppress(KeyError):
                self._urgent.unregister(fd)

    def wait(self, timeout_s: float) -> list[_Key]:
        """What is ready, most urgent first; empty after `timeout_s`, or earlier."""
        ready = [key for key, _ in self._selector.select(min(timeout_s, MAX_WAIT_S))]
        return sorted(ready, key=lambda key: key.data[0])

    def pause(self, time_s: float) -> None:
        """Leave output alone for so long. Anything else that is readable ends the pause."""
        self._urgent.poll(time_s * 1000)

    def serve(self, ready: list[_Key]) -> None:
        """Act on each, except those that an earlier one of them has unwatched. Output waits for the
        next turn when something more urgent comes while it is read."""
        looked_at = self._clock()
        for key in ready:
            if key.data[0] is Urgency.OUTPUT and self._clock() > looked_at + _LOOK_EVERY_S:
                if self._urgent.poll(0):
                    return
                looked_at = self._clock()
            if self._selector.get_map().get(key.fd) is key:
                key.data[1]()

    def close(self) -> None:
        self._selector.close()
