"""A death by SIGKILL: out of memory only if the cgroup counted it."""

import os
from pathlib import Path

import pytest

from launcher.contain.memory import Membership
from launcher.output.printer import Printer
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Outcome, Supervisor
from tests.launcher.supervise.lab import Lab, sh

COUNTS = "echo 'oom_kill 6' > $LAB/memory.events; "
SLEEP = sh("exec sleep 1000")


@pytest.fixture
def cgroup(lab: Lab) -> Membership:
    """A cgroup that has counted five so far, with files that a worker can write."""
    (lab.dir / "membership").write_text("0::/\n")
    (lab.dir / "memory.events").write_text("oom_kill 5\n")
    (lab.dir / "memory.max").write_text(f"{3 << 30}\n")
    return Membership(lab.dir / "membership", lab.dir)


def supervise(
    lab: Lab, cgroup: Membership, *commands: tuple[str, ...], grace_s: float = 9.0
) -> Outcome:
    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer = Printer(fd)
    specs = lab.specs(*commands)
    outcome = Supervisor(specs, Limits(grace_s, 0), printer, membership=cgroup).run()
    assert printer.close(60)
    os.close(fd)
    return outcome


def test_a_counter_that_moved_is_told_with_the_limit(lab: Lab, cgroup: Membership) -> None:
    outcome = supervise(lab, cgroup, SLEEP, sh(COUNTS + "kill -9 $$"))
    told = "the cgroup counted an OOM kill (limit 3.0 GiB)"
    assert [record.oom for record in outcome.workers] == [None, told]
    assert outcome.end.exit_code == 137
    assert outcome.end.reason is not None
    assert outcome.end.reason.startswith("W1 was killed for want of host memory: SIGKILL (9) after")
    assert f" s; {told} (a fault of this host; " in outcome.end.reason
    assert outcome.end.culprits == ()


def test_a_counter_that_did_not_move_is_no_claim(lab: Lab, cgroup: Membership) -> None:
    outcome = supervise(lab, cgroup, sh("kill -9 $$"))
    assert outcome.workers[0].oom is None
    assert "OOM" not in str(outcome.end.reason)
    assert outcome.end.culprits == ("W0",)


def test_other_ends_have_nothing_to_do_with_it(lab: Lab, cgroup: Membership) -> None:
    for ends in ("kill -15 $$", "exit 137"):
        outcome = supervise(lab, cgroup, sh(COUNTS + ends))
        assert outcome.workers[0].oom is None


def test_a_helpers_death_is_told_without_blaming_a_worker(lab: Lab, cgroup: Membership) -> None:
    supervise(lab, cgroup, sh(COUNTS + "exit 1"))
    told = "[launcher] during this run, the cgroup counted an OOM kill (limit 3.0 GiB)"
    assert told in lab.shown


def test_a_worker_that_we_killed_was_not_out_of_memory(lab: Lab, cgroup: Membership) -> None:
    deaf = sh("trap '' TERM; echo $$ > $LAB/deaf.pid; while :; do sleep 0.02; done")
    fails = sh("until [ -s $LAB/deaf.pid ]; do sleep 0.02; done; " + COUNTS + "exit 3")
    outcome = supervise(lab, cgroup, deaf, fails, grace_s=0.2)
    assert (outcome.workers[0].returncode, outcome.workers[0].oom) == (-9, None)


def test_a_machine_without_the_counter_makes_no_claim(lab: Lab) -> None:
    nowhere = Membership(Path("/nonexistent"), Path("/nonexistent"))
    assert supervise(lab, nowhere, sh("kill -9 $$")).workers[0].oom is None
