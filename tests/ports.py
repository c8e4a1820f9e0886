"""Ports that a test gives to processes which it starts."""

import itertools
import os
import socket

_FIRST, _NUM_EACH, _NUM_PROCESSES = 12_000, 100, 80
"""Below the ports that Linux gives to outgoing connections (32768), and those of Slurm's jobs: what
is free now is free when it is used. Processes of tests have ranges of their own."""
_counter = itertools.count()


def free_port() -> int:
    """One of TCP that nobody listens at, and another one each time."""
    begin = _FIRST + os.getpid() % _NUM_PROCESSES * _NUM_EACH
    for _ in range(_NUM_EACH):
        port = begin + next(_counter) % _NUM_EACH
        with socket.socket() as tried:
            # A connection that has ended keeps nobody from listening.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port is free from {begin} on")
