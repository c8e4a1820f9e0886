"""What the kernel tells of this very process, and what stacks tell in the texts of faulthandler and
py-spy."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from launcher.contain.processes import Process, read_process
from launcher.supervise.stacks import (
    MAX_LINES,
    catches,
    describe,
    innermost_calls,
    is_awake,
    is_python,
    state_of,
    work_of_all,
)
from tests.deadline import DEADLINE_S

FAULTHANDLER = """\
Thread 0x00007f3a56e1d6c0 (most recent call first):
  File "/lib/python3.11/threading.py", line 982 in run
  File "/lib/python3.11/threading.py", line 1045 in _bootstrap_inner

Current thread 0x00007f3a578a4b80 (most recent call first):
  File "/app/model_check/engine/step.py", line 41 in accumulate
  File "/app/model_check/engine/step.py", line 20 in train_step
  File "/app/model_check/engine/trainer.py", line ??? in _loop
  File "/app/pretrain_main.py", line 9 in <module>
"""
PY_SPY = """\
Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (active+gil): "MainThread"
    step (train.py:3)
    <module> (train.py:9)
Thread 4712 (idle): "pump"
    wait (threading.py:324)
"""


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


def test_the_main_thread_is_the_last_one_of_faulthandler() -> None:
    told = "accumulate (step.py:41) < train_step (step.py:20) < _loop (trainer.py:???)"
    assert innermost_calls(FAULTHANDLER) == told


def test_the_main_thread_is_named_by_py_spy() -> None:
    assert innermost_calls(PY_SPY) == "step (train.py:3) < <module> (train.py:9)"


def test_the_thread_that_holds_the_gil_is_named_by_py_spy() -> None:
    text = PY_SPY.replace("active+gil", "active").replace("(idle)", "(active+gil)")
    assert innermost_calls(text) == "wait (threading.py:324)"


def test_a_text_without_stacks_has_none() -> None:
    assert innermost_calls("") is None
    assert innermost_calls("Error: Permission denied (os error 1)\n") is None
    assert innermost_calls("Thread 0x1 (most recent call first):\n") is None


@pytest.mark.parametrize(("last", "works"), [("sleep 1000", False), ("while :; do :; done", True)])
def test_what_a_shell_has_started_sleeps_or_works(last: str, works: bool) -> None:
    """Of two looks, a while apart: the shell itself waits in both cases."""
    end = time.monotonic() + DEADLINE_S
    with subprocess.Popen(("sh", "-c", f"sh -c '{last}' & wait"), start_new_session=True) as shell:
        try:
            before, is_idle = work_of_all(shell.pid), works
            while is_idle is works:
                assert time.monotonic() < end
                time.sleep(0.03)
                now = work_of_all(shell.pid)
                is_idle, before = now == before and not is_awake(now), now
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_a_process_that_is_gone_has_done_nothing() -> None:
    with subprocess.Popen("true") as gone:
        pass
    assert work_of_all(gone.pid) == {}
