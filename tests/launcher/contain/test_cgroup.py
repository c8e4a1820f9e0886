"""The cgroup itself, without a supervisor."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

from launcher.contain import cgroup
from launcher.contain.cgroup import Cgroup
from launcher.contain.lifeline import Lifeline
from launcher.contain.processes import Family
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.cgroups import inside, new_cgroup

ROOT = Path(__file__).parents[3]
ENTERS_LATE = (
    "import os, select, sys\n"
    "from launcher.contain.trampoline import enter\n"
    "first, cgroup_fd = os.pidfd_open(int(sys.argv[1])), int(sys.argv[2])\n"
    "print('up', flush=True)\n"
    "select.select([first], [], [])\n"
    "enter(cgroup_fd)\n"
    "while True: select.select([], [], [])\n"
)
LAUNCHER = (
    "import os, signal\n"
    "from launcher.contain import processes\n"
    "from launcher.contain.lifeline import Lifeline\n"
    "me = os.getpid()\n"
    "made = Lifeline(processes.Family('b0' * 16, 0, me, os.getsid(0), frozenset()))\n"
    "print(made.guardian_pid, made.cgroup.directory, flush=True)\n"
    "os.kill(me, signal.SIGKILL)\n"
)


@pytest.fixture
def made() -> Iterator[Cgroup]:
    with new_cgroup() as made:
        yield made


def python(code: str, *arguments: str, inherited: Collection[int] = ()) -> "Popen[bytes]":
    command = (sys.executable, "-c", code, *arguments)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Popen(command, env=env, stdout=PIPE, stderr=DEVNULL, pass_fds=inherited)


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        os.sched_yield()


def members(made: Cgroup | None) -> list[int]:
    assert made is not None
    return [int(pid) for pid in Path(made.directory, "cgroup.procs").read_text().split()]


def test_a_process_that_enters_after_the_first_kill_is_ended_too(made: Cgroup) -> None:
    """As a worker that was just being started does, or it meets a cgroup that is gone."""
    first = Popen((*inside(made.directory), "sleep", "1000"))
    wait_until(lambda: first.pid in members(made))
    arguments = (str(first.pid), str(made.entry_fd))
    with python(ENTERS_LATE, *arguments, inherited=[made.entry_fd]) as late:
        assert late.stdout is not None
        assert late.stdout.readline() == b"up\n"
        cgroup.clear(made.directory, DEADLINE_S)
        assert first.wait() == -9
        assert late.wait(DEADLINE_S) != 0
    assert not os.path.exists(made.directory)


def test_a_process_that_enters_between_the_last_look_and_the_removal_is_ended_too(
    made: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, late = os.rmdir, []

    def rmdir(path: str) -> None:
        if not late:
            late.append(Popen((*inside(made.directory), "sleep", "1000")))
            wait_until(lambda: late[0].pid in members(made))
        remove(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    cgroup.clear(made.directory, DEADLINE_S)
    assert late[0].wait(DEADLINE_S) == -9
    assert not os.path.exists(made.directory)


def test_a_launcher_that_dies_before_its_first_worker_leaves_no_cgroup(made: Cgroup) -> None:
    with python(LAUNCHER) as launcher:
        assert launcher.stdout is not None
        guardian, directory = launcher.stdout.readline().decode().split()
    wait_until(lambda: not os.path.exists(f"/proc/{guardian}"))
    assert not os.path.exists(directory)


@pytest.mark.parametrize("guardian", ["alive", "killed"])
def test_what_is_still_inside_at_the_end_of_a_run_dies(made: Cgroup, guardian: str) -> None:
    lifeline = Lifeline(Family("b0" * 16, 0, os.getpid(), os.getsid(0), frozenset()))
    assert lifeline.cgroup is not None
    left = Popen((*inside(lifeline.cgroup.directory), "sleep", "1000"))
    wait_until(lambda: left.pid in members(lifeline.cgroup))
    if guardian == "killed":
        os.kill(lifeline.guardian_pid, signal.SIGKILL)
    lifeline.dismiss()
    assert left.wait(DEADLINE_S) == -9
    assert not os.path.exists(lifeline.cgroup.directory)


def test_runs_that_start_while_another_one_looks_for_leftovers_have_a_cgroup(
    made: Cgroup,
) -> None:
    """It removes an empty cgroup that is not locked yet."""
    is_over = threading.Event()

    def clear_all_the_time() -> None:
        while not is_over.is_set():
            cgroup.clear_leftovers()

    other = threading.Thread(target=clear_all_the_time)
    other.start()
    try:
        for _ in range(300):
            mine = cgroup.make()
            assert mine is not None
            assert os.path.exists(mine.directory)
            cgroup.clear(mine.directory)
            mine.close()
    finally:
        is_over.set()
        other.join()


def test_one_that_was_looked_at_before_it_was_locked_is_left_to_whoever_looks(
    made: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He removes by its path what he has locked."""
    mkdir, looked_at = os.mkdir, list[tuple[str, int]]()

    def make_and_be_seen(directory: str) -> None:
        mkdir(directory)
        if not looked_at:
            looked_at.append((directory, cgroup._lock(directory)))

    monkeypatch.setattr(os, "mkdir", make_and_be_seen)
    mine = cgroup.make()
    assert mine is not None
    (seen, lock_fd), *_ = looked_at
    cgroup.clear(seen, wait_s=0)
    assert os.path.exists(mine.directory)
    os.close(lock_fd)
    cgroup.clear(mine.directory)
    mine.close()
