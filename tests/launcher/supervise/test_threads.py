"""What the kernel tells of this very process."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from launcher.contain.processes import Process, read_process
from launcher.supervise.stacks import MAX_LINES, catches, describe, is_python, state_of


@pytest.fixture
def me() -> Process:
    row = read_process(os.getpid())
    assert row is not None
    return row


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield thread
    end.set()
    thread.join()


@pytest.fixture
def gone() -> int:
    """A pid that nobody has: its zombie was reaped."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_every_thread_has_a_line(me: Process, waiting: threading.Thread) -> None:
    first, *others = describe([me]).splitlines()
    assert first.startswith(f"pid {me.pid} (")
    assert "state R (running)" in first
    (line,) = (line for line in others if f"thread {waiting.native_id} (" in line)
    assert "): state " in line


def test_there_is_an_end_to_what_is_told(me: Process) -> None:
    lines = describe([me] * (MAX_LINES + 1)).splitlines()
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == "and more"


def test_who_is_gone_is_gone(me: Process, gone: int) -> None:
    assert describe([me._replace(pid=gone)]) == f"pid {gone} (): gone, 0 threads\n"
    assert state_of(gone) == "gone"
    assert not is_python(gone)
    assert not catches(gone, signal.SIGUSR1)


def test_a_signal_is_caught_while_it_has_a_handler(me: Process) -> None:
    number = signal.SIGRTMIN + 9
    assert not catches(me.pid, number)
    before = signal.signal(number, lambda *_: None)
    assert catches(me.pid, number)
    assert not catches(me.pid, number + 1)
    signal.signal(number, before)
    assert not catches(me.pid, number)


def test_this_is_python(me: Process) -> None:
    assert is_python(me.pid)
