"""The supervisor's end of the pipe on which the guardian waits for its death."""

import os
import signal
import subprocess

from launcher.contain import cgroup, guardian, processes
from launcher.contain.pidfd import pidfd_open
from launcher.contain.processes import Family
from model_check.utils.child import child_command
from model_check.utils.requests import requests_held

_EXIT_WAIT_MS = 1000
_KILL_WAIT_MS = 5000


class Lifeline:
    """A running guardian. Raises OSError when it cannot be started."""

    def __init__(self, family: Family) -> None:
        self._cgroup = cgroup.name_for(family.tag)
        theirs, self._fd = os.pipe()
        arguments = (family.tag, str(family.since_ticks), str(os.getpid()))
        try:
            with requests_held():
                self._guardian = subprocess.Popen(
                    child_command("launcher.contain.guardian", *arguments),
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,  # not the terminal: `run.sh | cat` ends when we do
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError:
            os.close(self._fd)
            raise
        finally:
            os.close(theirs)

    @property
    def guardian_pid(self) -> int:
        return self._guardian.pid

    def add(self, group: int) -> None:
        """Tell the guardian of a worker."""
        self._tell(str(group).encode())

    def dismiss(self) -> None:
        """Everybody is gone: so may the guardian."""
        self._tell(guardian.BYE)
        os.close(self._fd)
        if not self._has_ended(_EXIT_WAIT_MS):
            self._guardian.kill()
            self._has_ended(_KILL_WAIT_MS)
        if self._guardian.returncode != 0:  # somebody killed it, or we did
            cgroup.remove_named(self._cgroup)
        self._let_go()

    def cut(self) -> None:
        """We can't go on: let the guardian kill everybody. Whom SIGKILL can't kill, it awaits
        without us."""
        os.close(self._fd)
        self._has_ended(_KILL_WAIT_MS)
        self._let_go()

    def _has_ended(self, timeout_ms: int) -> bool:
        """Whether it ended in that time, and is reaped."""
        pidfd = pidfd_open(self._guardian.pid)
        try:
            ended = guardian.wait_for_any([pidfd], timeout_ms)
        finally:
            os.close(pidfd)
        if ended:
            self._guardian.wait()
        return ended

    def _let_go(self) -> None:
        if self._guardian.returncode is None:
            self._guardian.returncode = -signal.SIGKILL  # Popen must not warn that nobody waited
            processes.leave_behind([self._guardian.pid])

    def _tell(self, word: bytes) -> None:
        try:
            os.write(self._fd, word + b"\n")
        except BrokenPipeError:
            return  # somebody killed the guardian: the workers' PDEATHSIG is what is left
