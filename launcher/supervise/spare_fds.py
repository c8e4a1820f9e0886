"""Descriptors held in reserve: an end must work when a start failed for want of them."""

import os
from contextlib import ExitStack

_NUM = 8


def spare_fds() -> ExitStack:
    """`close` it when others need the numbers. Raises OSError when there are not so many."""
    with ExitStack() as fds:
        for _ in range(_NUM):
            fds.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return fds.pop_all()
