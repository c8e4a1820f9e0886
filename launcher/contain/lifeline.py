"""The supervisor's end of the pipe on which the guardian waits for its death, and their cgroup.

The supervisor makes the cgroup before the first worker, and the guardian clears it. Both hold it:
while one of them lives, no other run takes it for a leftover.
"""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress

from launcher.contain import cgroup, guardian, processes
from launcher.contain.linux import pidfd_open
from launcher.contain.processes import Family
from model_check.utils.child import child_command
from model_check.utils.requests import requests_held

_EXIT_WAIT_S = 1.0
_KILL_WAIT_S = 5.0


class Lifeline:
    """A running guardian. Raises OSError when it cannot be started."""

    def __init__(self, family: Family) -> None:
        cgroup.clear_leftovers()
        self.cgroup = made = cgroup.make()
        """Each worker enters it; None: none can be made here."""
        self._directory, inherited = (made.directory, [made.lock_fd]) if made else ("", [])
        arguments = (family.tag, str(family.since_ticks), self._directory)
        with requests_held(), ExitStack() as otherwise:
            otherwise.callback(self._close_cgroup)
            otherwise.callback(cgroup.clear, self._directory)
            self._guardian = subprocess.Popen(
                child_command("launcher.contain.guardian", *arguments),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # not the terminal: `run.sh | cat` ends when we do
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                pass_fds=inherited,
            )
            otherwise.callback(self._guardian.wait)
            otherwise.callback(self._guardian.kill)  # before that: the last callback is the first
            self.pidfd = pidfd_open(self._guardian.pid)
            """Readable when the guardian is dead: somebody killed it."""
            otherwise.pop_all()
        assert self._guardian.stdin is not None
        self._pipe = self._guardian.stdin
        self.guardian_pid = self._guardian.pid

    def add(self, group: int) -> None:
        """Tell the guardian of a worker."""
        self._write(b"%d" % group)

    def dismiss(self) -> None:
        """End the guardian: no process of the run is left."""
        self._write(guardian.BYE)
        self._close(_EXIT_WAIT_S)
        if self._guardian.returncode is None:
            self._guardian.kill()
            self._close(_KILL_WAIT_S)
        if self._guardian.returncode != 0:  # it was killed, so it did not clear the cgroup
            cgroup.clear(self._directory)
        self._let_go()

    def cut(self) -> None:
        """We can't go on: let the guardian kill the run's processes. When SIGKILL can't end one of
        them, the guardian waits for it without us."""
        self._close(_KILL_WAIT_S)
        self._let_go()

    def _close(self, wait_s: float) -> None:
        """Close the pipe, and reap the guardian if it ends in that time."""
        self._pipe.close()
        if processes.wait_for_any([self.pidfd], wait_s * 1000):
            self._guardian.wait()

    def _let_go(self) -> None:
        os.close(self.pidfd)
        self._close_cgroup()
        if self._guardian.returncode is None:
            self._guardian.returncode = -signal.SIGKILL  # Popen must not warn that nobody waited

    def _close_cgroup(self) -> None:
        if self.cgroup is not None:
            self.cgroup.close()

    def _write(self, word: bytes) -> None:
        # When somebody killed the guardian, the workers' PDEATHSIG is what is left.
        with suppress(BrokenPipeError):
            self._pipe.write(word + b"\n")
