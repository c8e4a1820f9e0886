"""The launchers of a comparison's trainings, and the signals that come meanwhile."""

import os
import re
import signal
from pathlib import Path

from launcher.compare.compare import Child, wait_for
from launcher.output.printer import Printer
from tests.deadline import DEADLINE_S


def test_no_signal_is_lost_to_the_thread_that_reads(tmp_path: Path) -> None:
    """The kernel gives one to any thread that does not block it, while the main one only looks."""
    terminal = os.open(tmp_path / "terminal", os.O_WRONLY | os.O_CREAT)
    printer = Printer(terminal)
    child = Child(["--version"], os.environ, tmp_path / "a.log", "[a] ", printer)
    os.kill(child.process.pid, signal.SIGSTOP)  # its pipe stays open
    status = Path(f"/proc/self/task/{child.reader.native_id}/status").read_text()
    os.kill(child.process.pid, signal.SIGCONT)
    assert wait_for([child]) is None
    assert printer.close(DEADLINE_S)
    os.close(terminal)
    assert child.process.returncode == 0
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)", status, re.MULTILINE)
    assert blocked is not None
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGTSTP):
        assert int(blocked[1], 16) >> (signum - 1) & 1, signum
