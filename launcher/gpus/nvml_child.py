"""The parent's side of a child process that asks NVML (`nvml.begin` is the child's side).

NVML is never asked in this process: a driver that hangs in the kernel cannot be interrupted, and a
process with a thread in there cannot even exit; a driver library that crashes must not take the
supervisor along.

The child answers in lines on its standard output. It names each call in shared memory before it
makes it, so that we can name the one that never returns: a line for each call would wake this
process a hundred times a second.
"""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from typing import NamedTuple

from launcher.contain import linux, processes
from launcher.gpus.nvml import ANNOUNCEMENT_BYTES
from model_check.utils.child import child_command
from model_check.utils.requests import requests_held

KILL_WAIT_S = 1.0
_READ_BYTES = 1 << 16


class Call(NamedTuple):
    """A call of NVML that has not returned."""

    began: float
    """Monotonic seconds."""
    name: str
    """With its GPU, if it is about one: `nvmlDeviceGetName on GPU 3`."""


class NvmlChild:
    """A running child. Start it from the main thread: it dies with the thread that started it."""

    def __init__(self, module: str, *arguments: str, stderr: int) -> None:
        """`module`: its `main` takes our pid and the descriptor of the shared memory before
        `arguments`. `stderr`: as of Popen. Raises OSError when it cannot be started."""
        self._announced_fd = linux.memfd_create("model_check_nvml")
        shared = str(os.getpid()), str(self._announced_fd)
        with ExitStack() as otherwise, requests_held():
            otherwise.callback(os.close, self._announced_fd)
            self._process = subprocess.Popen(
                child_command(module, *shared, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # A Ctrl-C is ours to answer.
                start_new_session=True,
                pass_fds=(self._announced_fd,),
            )
            otherwise.pop_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._unfinished_line = b""
        self.pid = self._process.pid
        self.fd = self._output.fileno()
        """Readable when `read_lines` would not block."""

    def is_readable(self, timeout_s: float) -> bool:
        """Wait so long for output, or for its end."""
        return processes.wait_for_any([self.fd], max(0.0, timeout_s) * 1000)

    def read_lines(self) -> list[bytes] | None:
        """The whole lines that have come; None: the child closed its output."""
        data = os.read(self.fd, _READ_BYTES)
        *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
        return lines if data else None

    def in_flight(self) -> Call | None:
        """The call that has not returned; None: the child has not begun, rests, or writes this."""
        announced = os.pread(self._announced_fd, ANNOUNCEMENT_BYTES, 0)
        began, _, name = announced.decode(errors="replace").strip().partition(" ")
        with suppress(ValueError):
            return Call(float(began), name) if name else None
        return None

    def ask_to_end(self) -> None:
        """Close its standard input. Does not wait."""
        self._input.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or -N after signal N; None: it has not ended within that time."""
        return processes.wait_for_child(self._process, timeout_s)

    def close(self, wait_s: float = KILL_WAIT_S) -> None:
        """End it, wait so long for that, and let everything go."""
        self.kill()
        self._input.close()
        self._output.close()
        os.close(self._announced_fd)
        if self.wait(wait_s) is None:
            # Stuck in the kernel: not even SIGKILL ends it. Popen must not warn that it still runs.
            self._process.returncode = -signal.SIGKILL
