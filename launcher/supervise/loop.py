"""A selector whose ready descriptors are served in order of urgency."""

import selectors
from collections.abc import Callable
from enum import IntEnum

_Key = selectors.SelectorKey


MAX_WAIT_S = 3600.0
"""epoll counts milliseconds in an int: a longer wait would overflow it."""


class Urgency(IntEnum):
    """Who is served first within one wake-up: a flood of output must not delay a death."""

    SIGNAL = 0
    DEATH = 1
    EVENT = 2
    OUTPUT = 3


class Loop:
    """Descriptors and what to do when they are readable. Equal urgencies keep the kernel's order,
    which is the order in which they became ready."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._outputs = selectors.EpollSelector()  # within the other, so that it can be left out
        self._hears_output = False

    def watch(
        self, fd: int, when_readable: Callable[[], None], urgency: Urgency = Urgency.DEATH
    ) -> None:
        selector = self._outputs if urgency is Urgency.OUTPUT else self._selector
        selector.register(fd, selectors.EVENT_READ, (urgency, when_readable))

    def unwatch(self, fd: int) -> None:
        """Before `fd` is closed; harmless when it is not watched."""
        for selector in (self._selector, self._outputs):
            if fd in selector.get_map():
                selector.unregister(fd)

    def wait(self, timeout_s: float | None, *, hear_output: bool = True) -> list[_Key]:
        """What is ready, most urgent first; empty after `timeout_s` (None: no limit), or earlier.
        Without `hear_output`, output neither wakes us nor is it among what is ready."""
        self._hear_output(hear_output)
        if timeout_s is not None:
            timeout_s = min(timeout_s, MAX_WAIT_S)
        ready = [key for key, _ in self._selector.select(timeout_s) if key.data is not None]
        if hear_output:
            ready += [key for key, _ in self._outputs.select(0)]
        return sorted(ready, key=lambda key: key.data[0])

    def serve(self, ready: list[_Key]) -> None:
        """Act on each, but for those that an earlier one of them has unwatched, and for output that
        can wait because somebody died meanwhile: 64 full pipes take 30 ms."""
        has_read = False
        for key in ready:
            if key.data[0] is Urgency.OUTPUT:
                if has_read and self._is_urgent():
                    return
                has_read = True
            if self._watched(key.fd) is key:
                key.data[1]()

    def close(self) -> None:
        self._outputs.close()
        self._selector.close()

    def _hear_output(self, wanted: bool) -> None:
        if wanted and not self._hears_output:
            self._selector.register(self._outputs, selectors.EVENT_READ, None)
        elif self._hears_output and not wanted:
            self._selector.unregister(self._outputs)
        self._hears_output = wanted

    def _is_urgent(self) -> bool:
        """Whether a signal or a death waits. Events do not count: they may never end."""
        ready = [key.data for key, _ in self._selector.select(0) if key.data is not None]
        return any(urgency <= Urgency.DEATH for urgency, _ in ready)

    def _watched(self, fd: int) -> _Key | None:
        return self._selector.get_map().get(fd) or self._outputs.get_map().get(fd)
