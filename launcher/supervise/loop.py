"""A selector whose ready descriptors are served in order of urgency."""

import selectors
from collections.abc import Callable
from enum import IntEnum

_Key = selectors.SelectorKey
MAX_WAIT_S = 3600.0
"""epoll counts milliseconds in an int: a longer wait would overflow it."""


class Urgency(IntEnum):
    """Which descriptors are served first within one wake-up: output must not delay a death."""

    SIGNAL = 0
    DEATH = 1
    EVENT = 2
    OUTPUT = 3


class Loop:
    """Descriptors and what to do when they are readable. Equal urgencies keep the kernel's order,
    which is the order in which they became ready."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()

    def watch(
        self, fd: int, when_readable: Callable[[], None], urgency: Urgency = Urgency.DEATH
    ) -> None:
        self._selector.register(fd, selectors.EVENT_READ, (urgency, when_readable))

    def unwatch(self, fd: int) -> None:
        """Before `fd` is closed; harmless when it is not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def wait(self, timeout_s: float) -> list[_Key]:
        """What is ready, most urgent first; empty after `timeout_s`, or earlier."""
        ready = [key for key, _ in self._selector.select(min(timeout_s, MAX_WAIT_S))]
        return sorted(ready, key=lambda key: key.data[0])

    def serve(self, ready: list[_Key]) -> None:
        """Act on each, except those that an earlier one of them has unwatched."""
        for key in ready:
            if self._selector.get_map().get(key.fd) is key:
                key.data[1]()

    def close(self) -> None:
        self._selector.close()
