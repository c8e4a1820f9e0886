"""Descriptors held in reserve: an end must work when a start failed for want of them."""

import os

_NUM = 8


class SpareFds:
    """`take` them early, `free` them when others need the numbers."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def take(self) -> None:
        """Raises OSError when there are not so many."""
        for _ in range(_NUM):
            self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def free(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
