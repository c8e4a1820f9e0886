"""Children who fork and end all the time: nobody who looks for them sees the same one twice."""

import os
import signal
import time
from pathlib import Path

import pytest

from launcher.contain import processes
from launcher.contain.guardian import kill_all
from launcher.contain.processes import Family
from tests.launcher.supervise.lab import Lab, Launch, is_alive, python, sh

RUNS = (
    "import os, signal, sys, time\n"
    "beats, leaves_group, pause_s = sys.argv[1], sys.argv[2] == 'leap', float(sys.argv[3])\n"
    "if sys.argv[4] == 'deaf': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "def has_run(): return os.path.exists(beats) and os.path.getsize(beats) >= 20\n"
    "if os.fork():\n"
    "    while not has_run(): time.sleep(0.005)\n"
    "    os._exit(int(sys.argv[5]))\n"
    "os.setsid()\n"
    "fd = os.open(beats, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
    "for _ in range(int(6 / max(pause_s, 0.0005))):\n"
    "    os.write(fd, b'.')\n"
    "    time.sleep(pause_s)\n"
    "    if os.fork(): os._exit(0)\n"
    "    if leaves_group: os.setsid()\n"
)
BEAT_S = 0.1
"""A runaway that lives writes hundreds of times in it, alone on this machine or not."""


def runs(lab: Lab, how: str, pause_s: float, hears: str, code: int) -> tuple[str, ...]:
    return python(RUNS, str(lab.dir / "beats"), how, str(pause_s), hears, str(code))


def assert_it_is_dead(lab: Lab) -> None:
    beats = lab.dir / "beats"
    before = beats.stat().st_size
    assert before > 0, "it never ran"
    time.sleep(BEAT_S)
    assert beats.stat().st_size == before, "it runs on"


@pytest.mark.parametrize("how", ["hop", "leap"])
@pytest.mark.parametrize("pause_s", [0.003, 0.0])
@pytest.mark.parametrize("hears", ["polite", "deaf"])
@pytest.mark.parametrize("code", [0, 5])
def test_a_runaway_does_not_outlive_a_run(
    lab: Lab, how: str, pause_s: float, hears: str, code: int
) -> None:
    children = processes.children(os.getpid())
    outcome = lab.run(runs(lab, how, pause_s, hears, code), grace_s=0.2)
    assert (outcome.end.exit_code, outcome.end.leftovers) == (code, ())
    assert_it_is_dead(lab)
    assert processes.children(os.getpid()) == children, "zombies were left to this process"


def test_a_run_with_runaways_that_are_asked_ends_before_its_grace(lab: Lab) -> None:
    commands = [runs(lab, "hop", 0.003, "polite", 0)] * 3
    assert lab.run(*commands, grace_s=1000.0).end.exit_code == 0
    assert_it_is_dead(lab)


@pytest.mark.parametrize("how", ["hop", "leap"])
def test_a_runaway_does_not_outlive_a_killed_supervisor(lab: Lab, launch: Launch, how: str) -> None:
    run = launch(runs(lab, how, 0.003, "deaf", 0), sh("echo up; exec sleep 1000"))
    wait_for_beats(lab.dir / "beats")
    guardian = run.guardian
    run.process.kill()
    run.process.wait()
    wait_for_death(guardian)
    assert_it_is_dead(lab)


def wait_for_beats(beats: Path) -> None:
    while not beats.exists() or beats.stat().st_size < 20:
        os.sched_yield()


def wait_for_death(pid: int) -> None:
    while is_alive(pid):
        time.sleep(0.01)


def test_a_guardian_with_nobody_to_kill_is_soon_done() -> None:
    """However many strangers come and go meanwhile."""
    since_ticks = processes.now_ticks()
    kill_all(Family("tag-of-nobody", since_ticks, None, 0, frozenset()), set())


def test_a_group_of_nobodys_number_is_never_signalled() -> None:
    for group in (0, 1):  # to the kernel: our own group; everybody
        processes.send_group(group, signal.SIGKILL)


def test_work_that_workers_leave_in_the_background_is_ended_and_told(lab: Lab) -> None:
    leaves = sh(
        "setsid sh -c 'echo $$ > $LAB/left.pid; exec sleep 1000' & "
        "until [ -s $LAB/left.pid ]; do sleep 0.02; done"
    )
    assert lab.run(leaves).end.exit_code == 0
    pid = lab.pids()["left"]
    assert not is_alive(pid)
    (told,) = [line for line in lab.shown if "background" in line]
    assert f"pid {pid} (sleep)" in told


def test_a_run_that_leaves_nothing_says_nothing(lab: Lab) -> None:
    assert lab.run(sh("sleep 0.01 & wait")).end.exit_code == 0
    assert lab.shown == []


def test_a_guardian_that_was_killed_is_told_once(lab: Lab, launch: Launch) -> None:
    run = launch(sh("echo up; until [ -e $LAB/go ]; do sleep 0.02; done"))
    run.wait_for("[W0] up")
    os.kill(run.guardian, signal.SIGKILL)
    run.wait_for("the guardian was killed")
    (lab.dir / "go").touch()
    assert run.wait() == 0


@pytest.mark.root
def test_without_proc_it_is_told_that_runaways_cannot_be_found(lab: Lab, launch: Launch) -> None:
    without = ("unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh")
    run = launch(sh("true"), prefix=without)
    run.wait_for("no /proc: ")
    assert run.wait() == 0
