"""A run's cgroup: every process of a worker is inside, and none of them outlives the run."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.contain import cgroup
from launcher.contain.cgroup import Cgroup
from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise.outcome import Outcome
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor
from launcher.supervise.worker import Spawned, spawn
from tests.launcher.supervise.cgroups import cgroups_of, inside, new_cgroup, threaded
from tests.launcher.supervise.lab import Lab, Launch, OwnProcess, is_alive, sh, wait_until_dead

DRIVER = Path(__file__).with_name("driver.py")
UP = "echo $$ > $LAB/$$.pid; echo up; exec sleep 1000"
HIDES = sh(f"env -i LAB=$LAB setsid sh -c '{UP}' & exec sleep 1000")
"""Its first act is a child that only a cgroup can identify once the launcher is dead."""
TELLS = sh("grep ^0:: /proc/self/cgroup; ls -l /proc/self/fd/")
MANY = 8


@pytest.fixture(autouse=True)
def outer() -> Iterator[Cgroup]:
    """A cgroup of the test's own."""
    with new_cgroup() as made:
        yield made


def hidden(lab: Lab, run: OwnProcess, num_workers: int) -> list[int]:
    """The pids of the hidden children, when all of them are up."""
    for _ in range(num_workers):
        run.wait_for("] up")
    pids = list(lab.pids().values())
    assert len(pids) == num_workers
    return pids


def test_every_worker_is_inside_before_its_first_instruction(lab: Lab) -> None:
    """Also those of a later run in the same process, as a training is after its preparation."""
    runs = []
    for _ in range(2):
        assert lab.run(*[TELLS] * MANY).end.exit_code == 0
        logs = [lab.log(f"w{i}").decode() for i in range(MANY)]
        runs.append({log.split()[0] for log in logs})
        assert not any("cgroup" in line for log in logs for line in log.splitlines()[1:]), logs
        for log in lab.dir.glob("w*.log"):
            log.unlink()
    (first,), (second,) = runs
    assert "model_check_" in first != second


def test_a_child_that_was_forked_at_once_and_hides_dies_with_a_killed_supervisor(
    lab: Lab, launch: Launch
) -> None:
    """It has no environment and no session of ours, and nothing descends from the dead."""
    run = launch(*[HIDES] * MANY)
    pids = hidden(lab, run, MANY)
    guardian, made = run.guardian, {path for pid in pids for path in cgroups_of(pid)}
    run.process.kill()
    wait_until_dead([guardian])
    assert not [pid for pid in pids if is_alive(pid)]
    assert not [path for path in made if path.exists()]


@pytest.mark.root
def test_a_child_that_changes_its_user_dies_with_a_killed_supervisor(
    lab: Lab, launch: Launch
) -> None:
    changes = "exec setpriv --reuid 65534 --clear-groups sh -c 'echo up; exec sleep 1000'"
    child = 'setsid sh -c "echo \\$\\$ > $LAB/\\$\\$.pid; $CHANGES"'
    run = launch(*[sh(f'CHANGES="{changes}"; {child} & exec sleep 1000')] * MANY)
    pids, guardian = hidden(lab, run, MANY), run.guardian
    run.process.kill()
    wait_until_dead([guardian])
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_launcher_that_a_worker_is_has_its_cgroup_inside(lab: Lab, launch: Launch) -> None:
    (lab.dir / "inner").mkdir()
    plan = {"dir": str(lab.dir / "inner"), "limits": {"grace_s": 9, "silence_s": 0}}
    inner = (sys.executable, str(DRIVER), json.dumps(plan | {"commands": [HIDES]}))
    run = launch(inner)
    (pid,) = hidden(lab, run, 1)
    (path,) = cgroups_of(pid)
    assert str(path).count("model_check_") == 2
    guardian = run.guardian
    run.process.kill()
    wait_until_dead([guardian])
    assert not is_alive(pid)
    assert not path.parent.exists()


def test_the_next_run_ends_what_a_killed_guardian_could_not(
    lab: Lab, launch: Launch, outer: Cgroup
) -> None:
    """In a cgroup of the test's own: runs of other tests look for leftovers beside it."""
    prefix = inside(outer.directory)
    run = launch(HIDES, prefix=prefix)
    (pid,), guardian = hidden(lab, run, 1), run.guardian
    (made,) = cgroups_of(pid)
    os.kill(guardian, signal.SIGKILL)
    run.process.kill()
    wait_until_dead([guardian, run.process.pid])
    assert launch(sh("true"), prefix=prefix).wait() == 0
    wait_until_dead([pid])
    assert launch(sh("true"), prefix=prefix).wait() == 0
    assert not made.exists()


def test_an_empty_cgroup_that_nobody_was_left_to_remove_goes_with_the_next_run(
    lab: Lab, launch: Launch, outer: Cgroup
) -> None:
    prefix = inside(outer.directory)
    run = launch(sh(UP), prefix=prefix)
    (pid,), guardian = hidden(lab, run, 1), run.guardian
    (made,) = cgroups_of(pid)
    os.kill(guardian, signal.SIGKILL)
    run.process.kill()
    wait_until_dead([guardian, run.process.pid, pid])
    while "populated 1" in (made / "cgroup.events").read_text():
        os.sched_yield()  # the dead leave it a little later than they die
    assert list(cgroup.leftovers(str(made.parent))) == [str(made)]
    assert launch(sh("true"), prefix=prefix).wait() == 0
    assert not made.exists()


def test_the_cgroup_goes_with_its_run_though_the_guardian_was_killed(
    lab: Lab, launch: Launch
) -> None:
    """A batch system could not remove its own around it."""
    run = launch(sh("echo $$ > $LAB/up.pid; echo up; until [ -e $LAB/go ]; do sleep 0.02; done"))
    (pid,), guardian = hidden(lab, run, 1), run.guardian
    (made,) = cgroups_of(pid)
    os.kill(guardian, signal.SIGKILL)
    wait_until_dead([guardian])
    assert str(made) not in cgroup.leftovers(str(made.parent))
    (lab.dir / "go").touch()
    assert run.wait() == 0
    assert not made.exists()


def test_a_cgroup_of_a_run_that_lives_is_nobodys_to_remove(lab: Lab, outer: Cgroup) -> None:
    """It is empty until the first worker enters it."""
    assert lab.run(sh("true")).end.exit_code == 0
    assert os.path.exists(outer.directory)


# -- a worker that cannot enter


def run_with(lab: Lab, cgroup_fd: int) -> Outcome:
    """A run whose worker is given this descriptor to enter."""

    def enters(spec: WorkerSpec, run_tag: str, _: int | None) -> Spawned:
        return spawn(spec, run_tag, cgroup_fd)

    fd = os.open(os.devnull, os.O_WRONLY)
    printer = Printer(fd)
    outcome = Supervisor(lab.specs(sh("echo up")), Limits(9, 0), printer, spawn=enters).run()
    assert printer.close(60)
    os.close(fd)
    return outcome


def test_a_worker_whose_cgroup_was_removed_does_not_start(lab: Lab) -> None:
    """Only a guardian whose launcher is dead removes it: the worker would outlive the run."""
    with new_cgroup() as made:
        cgroup.clear(made.directory)
        outcome = run_with(lab, made.entry_fd)
    assert outcome.end.exit_code == 126
    assert "the run's cgroup was removed" in str(outcome.workers[0].spawn_error)
    assert lab.log("w0") == b""


def test_a_worker_that_may_not_enter_runs_outside_and_says_so(lab: Lab, launch: Launch) -> None:
    """Below a threaded cgroup, the kernel lets nobody enter an ordinary one."""
    with new_cgroup() as made, threaded(made.directory):
        run = launch(sh("echo up"), prefix=inside(made.directory))
        assert run.wait() == 0
    assert lab.log("w0") == b"not in the run's cgroup: Operation not supported\nup\n"
