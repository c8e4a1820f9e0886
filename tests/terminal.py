"""A program on a real terminal of its own, and what that shows."""

import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path

from tests.deadline import DEADLINE_S
from tests.screen import Screen


class Terminal:
    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        *,
        columns: int = 80,
        is_held: bool = False,
    ) -> None:
        """`is_held`: it takes no output, as after Ctrl-S."""
        self.fd, theirs = pty.openpty()
        if is_held:
            termios.tcflow(theirs, termios.TCOOFF)
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.screen = Screen()
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={"TERM": "xterm", "NO_COLOR": "1"} | dict(env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""
        """All that it was sent."""

    def row(self, worker: str) -> str:
        """Returns the worker's row of a live table, as it stands now; empty: there is none."""
        rows = [line for line in self.screen.lines if line.startswith(f"{worker} ")]
        return rows[-1] if rows else ""

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, self.screen.lines
            assert self._read(), self.screen.lines

    def rest(self) -> str:
        """Returns all that it was sent, once the program is gone."""
        while self._read():
            pass
        return self.seen

    def type(self, key: str) -> None:
        os.write(self.fd, key.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    def _read(self) -> bool:
        """False: the program is gone."""
        if not select.select([self.fd], [], [], DEADLINE_S)[0]:
            return False
        try:
            read = os.read(self.fd, 65536).decode(errors="replace")
        except OSError:
            return False
        self.seen += read
        self.screen.write(read)
        return bool(read)
