"""Signals to a whole run, from its first instant to its last: nobody dies of a notice, none is
lost, and whoever is stopped is told how to go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher

MANY = "--max-steps=100000"


def wait_until_held(pid: int, signum: int, *masks: str) -> None:
    """Until this process holds the signal back, by one of these masks of /proc."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if any(int(status[mask], 16) >> (signum - 1) & 1 for mask in masks):
            return
        os.sched_yield()
    raise AssertionError(f"pid {pid} never held back signal {signum}")


def read_until_both_step(process: subprocess.Popen[str]) -> str:
    """What a launcher of two workers says until both have trained two steps."""
    assert process.stdout is not None
    seen = ""
    waiting = {"[CPU0] Step [2/", "[CPU1] Step [2/"}
    for line in process.stdout:
        seen += line
        waiting = {words for words in waiting if not line.startswith(words)}
        if not waiting:
            break
    return seen


def test_a_notice_before_there_are_workers_reaches_them_when_they_run(scripted: Launcher) -> None:
    go = scripted.cwd / "go"
    process = scripted.start(MANY, "training.save_on_signal=true", PREPARES_WHEN=str(go))
    wait_until_held(process.pid, signal.SIGUSR1, "SigBlk")
    process.send_signal(signal.SIGUSR1)
    go.touch()
    run = scripted.finish(process)
    assert run.exit_code == 0, run.output
    assert "[launcher] SIGUSR1 received: it is passed on when the workers run" in run.output
    assert set(run.verdicts().values()) == {"STOPPED"}
    for worker in ("cpu0", "cpu1"):
        assert (scripted.cwd / ".checkpoints" / worker / "last.pt").exists()


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_notices_from_the_first_line_on_kill_no_start(launcher: Launcher, signum: int) -> None:
    process = subprocess.Popen(
        ["bash", str(ROOT / "run.sh"), *launcher.arguments("--dry-run")[3:]],
        cwd=launcher.cwd,
        env=launcher.env | {"MODEL_CHECK_PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
    )
    wait_until_held(process.pid, signum, "SigIgn", "SigBlk")
    until = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < until:
        process.send_signal(signum)
        time.sleep(0.001)
    assert process.wait(DEADLINE_S) == 0


def test_who_stops_a_training_that_saves_nothing_is_told_nothing(scripted: Launcher) -> None:
    process = scripted.start(MANY)
    seen = read_until_both_step(process)
    process.send_signal(signal.SIGTERM)
    run = scripted.finish(process, seen)
    assert run.exit_code == 143, run.output
    assert "checkpoint" not in run.output


def test_a_notice_kills_and_blames_no_worker_that_does_not_save_at_one(scripted: Launcher) -> None:
    process = scripted.start("--max-steps", "400")
    seen = read_until_both_step(process)
    process.send_signal(signal.SIGUSR1)
    run = scripted.finish(process, seen)
    assert run.exit_code == 0, run.output
    assert set(run.verdicts().values()) == {"PASS"}
