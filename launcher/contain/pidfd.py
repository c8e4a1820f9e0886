"""Processes by descriptor, also where Python lacks the calls: conda's and uv's builds are made for
a C library from before them, and the kernel offers them all the same.

Standard library only: the guardian imports this.
"""

import os
import signal

P_PIDFD = 3
"""For `os.waitid`."""


def pidfd_open(pid: int) -> int:
    """A descriptor of this process, close-on-exec; readable when it is dead. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    from launcher.contain import linux

    return linux.pidfd_open(pid)


def send_signal(pidfd: int, signum: int) -> None:
    """Raises OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, signum)
        return
    from launcher.contain import linux

    linux.pidfd_send_signal(pidfd, signum)
