"""Launchers of one job that do not come together: one is refused, asked to end, of another version,
or broken. All of them end in time, with its reason."""

import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher, Run
from tests.e2e.nodes import LOOPBACK, Job, Node, hooked
from tests.e2e.test_ddp import LONG, RESTING
from tests.e2e.test_run import read_until

FIRST, SECOND = LOOPBACK
REFUSED = "training.batch_size=0"
WAITS = "telling the other nodes of the job"


@pytest.fixture
def job(scripted: Launcher) -> Job:
    return Job(scripted)


def told(run: Run) -> str:
    return str(run.report()["summary"])


def other(node: Node) -> Node:
    return LOOPBACK[1 - node.number]


@pytest.mark.parametrize("node", LOOPBACK, ids=["first", "second"])
def test_a_node_that_is_refused_tells_why(job: Job, node: Node) -> None:
    """It waits for the other one to tell it."""
    (refused,) = job.start(REFUSED, only=node)
    seen = read_until(refused, WAITS)
    (process,) = job.start(only=other(node))
    run, its = job.finish([process, refused], "", seen)
    assert (run.exit_code, its.exit_code) == (2, 2), run.output + its.output
    assert "batch_size" in its.output
    assert told(run).startswith(f"{node.name}: command line: training.batch_size"), run.output
    assert run.report()["elsewhere"]["node"] == node.name
    again = job.launcher.verb("report", str(run.directory))
    assert again.returncode == 2, again.stdout


def test_nodes_that_are_all_refused_do_not_wait_for_each_other(job: Job) -> None:
    runs = job(REFUSED)
    assert [run.exit_code for run in runs] == [2, 2]
    for run in runs:
        assert "batch_size" in run.output
        assert WAITS not in run.output


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ("--no-such-option", 2, "--no-such-option"),
        ("system.device=cuda", 69, "system.device = cuda: no "),
    ],
)
def test_whatever_refuses_a_node_is_told(job: Job, asked: str, code: int, words: str) -> None:
    processes = [*job.start(asked, only=SECOND), *job.start(only=FIRST)]
    its, run = job.finish(processes)
    assert (run.exit_code, its.exit_code) == (code, code), run.output + its.output
    assert told(run).startswith("n2: ")
    assert words in told(run)


def test_a_run_directory_that_cannot_be_made_is_told(job: Job) -> None:
    job.directory(0).parent.mkdir()
    job.directory(1).write_text("")
    run, its = job()
    assert (run.exit_code, its.exit_code) == (2, 2), run.output + its.output
    assert told(run).startswith("n2: ")
    assert str(job.directory(1)) in told(run)


def test_a_refused_node_does_not_wait_for_ever_for_the_first(job: Job) -> None:
    (run,) = job.finish(job.start(REFUSED, only=SECOND))
    assert run.exit_code == 2
    assert WAITS in run.output


def test_who_waits_to_tell_goes_when_it_is_asked_to(job: Job, tmp_path: Path) -> None:
    for_ever = hooked(tmp_path, "import launcher.nodes.absence as a\na.TELL_S = 1000.0")
    (process,) = job.start(REFUSED, only=FIRST, **for_ever)
    seen = read_until(process, WAITS)
    process.send_signal(signal.SIGTERM)
    (run,) = job.finish([process], seen)
    assert run.exit_code == 2, run.output


@pytest.mark.parametrize(
    "where",
    ["launcher.run_dir.create", "launcher.plan.plan_prepare"],
    ids=["before the meeting", "after the meeting"],
)
def test_a_fault_of_ours_is_told_as_that(job: Job, tmp_path: Path, where: str) -> None:
    module, _, name = where.rpartition(".")
    code = f"import {module}\ndef broken(*_, **__): raise KeyError('odd')\n{module}.{name} = broken"
    processes = [*job.start(only=SECOND, **hooked(tmp_path, code)), *job.start(only=FIRST)]
    its, run = job.finish(processes)
    assert (run.exit_code, its.exit_code) == (70, 70), run.output + its.output
    assert "Traceback" in its.output
    assert told(run) == "n2: a fault of Model Check itself: KeyError: 'odd'"


def test_a_link_that_breaks_ends_all_as_a_fault_of_ours(job: Job, tmp_path: Path) -> None:
    code = f"""
import os
from launcher.nodes.follower import Follower
def check(self, now, really=Follower._check):
    if os.path.exists({str(tmp_path / "now")!r}):
        raise KeyError("odd")
    really(self, now)
Follower._check = check
"""
    (process,) = job.start(LONG, only=FIRST, **RESTING)
    (broken,) = job.start(LONG, only=SECOND, **RESTING, **hooked(tmp_path, code))
    seen = read_until(process, "Step [3/")
    (tmp_path / "now").touch()
    run, its = job.finish([process, broken], seen)
    assert (run.exit_code, its.exit_code) == (70, 70), run.output + its.output
    why = "a fault of Model Check itself in the link between the launchers: KeyError: 'odd'"
    assert why in told(its)
    assert told(run).startswith(f"n2: {why}")
    assert "[launcher] KeyError: 'odd'" in its.output
    assert "Traceback" in (its.directory / "launcher.log").read_text()


def test_another_version_is_named_on_all_nodes(job: Job, tmp_path: Path) -> None:
    code = "import model_check.utils.project_files as p\np.version = lambda: '0.0.1'"
    processes = [*job.start(only=SECOND, **hooked(tmp_path, code)), *job.start(only=FIRST)]
    for run in job.finish(processes):
        assert run.exit_code == 2, run.output
        assert "n2 runs Model Check 0.0.1" in run.output or (
            "and n2 0.0.1: install the same on all nodes" in run.output
        )


PHASES = {
    "greeting": "Model Check: ",
    "meeting": "waiting for the launchers of the other nodes",
    "preparing": "all 2 nodes are here",
    "beginning": "starting the training",
}
ASKED = [(phase, node) for phase in PHASES for node in LOOPBACK]
OFTEN = [("greeting", FIRST), ("meeting", SECOND), ("preparing", SECOND), ("beginning", FIRST)]


@pytest.mark.parametrize(
    ("phase", "node"),
    [pytest.param(*each, marks=() if each in OFTEN else pytest.mark.slow) for each in ASKED],
    ids=lambda value: value.name if isinstance(value, Node) else value,
)
def test_a_request_in_any_phase_ends_all_as_that(job: Job, phase: str, node: Node) -> None:
    is_alone = phase in ("greeting", "meeting")
    before = [] if is_alone else job.start(LONG, only=other(node), **RESTING)
    (asked,) = job.start(LONG, only=node, **RESTING)
    seen = read_until(asked, PHASES[phase])
    asked.send_signal(signal.SIGTERM)
    after = job.start(LONG, only=other(node), **RESTING) if is_alone else []
    its, run = job.finish([asked, *before, *after], seen)
    assert (its.exit_code, run.exit_code) == (143, 143), its.output + run.output
    assert told(run) == f"{node.name}: SIGTERM received"
    # A job that is asked to end before a worker was started has none.
    assert {*its.verdicts().values(), *run.verdicts().values()} <= {"STOPPED"}
