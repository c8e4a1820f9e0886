"""One job on two nodes that a cable joins (two network namespaces, a veth pair): what becomes of it
when the cable, or a node, goes. Each side ends in time, and names a node, never a GPU."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher, Run
from tests.e2e.nodes import Job, Node, cable, pids_on
from tests.e2e.test_ddp import LONG, RESTING, SOON, losses, without_eta
from tests.e2e.test_run import read_until

pytestmark = pytest.mark.netns
Fault = Callable[[Node, Node], None]


class NodeWithDisk(Node):
    def inside(self, *command: str) -> list[str]:
        """`disk` is its own."""
        own = 'mount -t tmpfs none disk && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", own, "sh", *super().inside(*command)]


@pytest.fixture
def apart(launcher: Launcher) -> Iterator[Job]:
    """With real ranks."""
    with cable() as nodes:
        yield Job(launcher, nodes)


@pytest.fixture
def scripted_apart(scripted: Launcher) -> Iterator[Job]:
    with cable() as nodes:
        yield Job(scripted, nodes)


def signal_all(node: Node, signum: signal.Signals) -> None:
    """Every process that runs on it. The first that hear it may end others before these do."""
    for pid in pids_on(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def cut(_: Node, second: Node) -> None:
    second.cut()


def lose(first: Node, second: Node) -> None:
    first.lose(second)
    second.lose(first)


def kill(_: Node, second: Node) -> None:
    signal_all(second, signal.SIGKILL)


def kill_first(first: Node, _: Node) -> None:
    """It has the store, and the launcher that numbers what is told."""
    signal_all(first, signal.SIGKILL)


def freeze(_: Node, second: Node) -> None:
    signal_all(second, signal.SIGSTOP)


def told(run: Run) -> str:
    return str(run.report()["summary"])


def is_innocent(run: Run) -> bool:
    report = run.report()
    rows = {worker["verdict"] for worker in report["workers"]}
    return report["verdict"] == "INCONCLUSIVE" and rows == {"STOPPED"} and not report["culprits"]


@pytest.mark.slow
def test_two_machines_train_what_one_trains(apart: Job) -> None:
    alone = apart.launcher("--mode", "ddp", "--run-dir", "alone")
    assert alone.exit_code == 0, alone.output
    first, second = apart()
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert losses(first.directory) == losses(second.directory)
    assert losses(first.directory) == losses(apart.launcher.cwd / "alone")


@pytest.mark.slow
def test_a_checkpoint_that_only_the_first_node_sees_is_told_as_that(launcher: Launcher) -> None:
    """Each machine has a disk of its own at system.checkpoint_dir."""
    nodes = (Node(0), NodeWithDisk(1))
    job, where = Job(launcher, nodes), launcher.cwd / "disk"
    where.mkdir()
    asked = (f"system.checkpoint_dir={where}", "--resume", "auto", "training.save_last=true")
    for run in job(*asked):
        assert run.exit_code == 0, run.output
    (launcher.cwd / "run").rename(launcher.cwd / "before")
    for run in job(*asked):
        assert run.exit_code == 2, run.output
        assert "last.pt: rank 1 does not see it, others do" in told(run)
        assert "system.checkpoint_dir must be on a file system that all nodes share" in told(run)


@pytest.mark.slow
def test_torchrun_on_two_machines_trains_what_one_trains(apart: Job) -> None:
    alone = apart.launcher("--mode", "ddp", "--run-dir", "alone")
    outputs = [run.output for run in apart.finish(apart.torchrun())]
    (steps,) = [lines for output in outputs if (lines := steps_of(output))]
    assert without_eta(steps) == without_eta(alone.lines("[CPU0] Step ["))


def steps_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if " Step [" in line]


@pytest.mark.parametrize("fault", [cut, lose, freeze])
def test_a_node_that_is_not_heard_any_more_ends_the_other(
    scripted_apart: Job, fault: Fault
) -> None:
    apart = scripted_apart
    first, second = apart.nodes
    processes = apart.start(LONG, SOON, **RESTING)
    seen = read_until(processes[0], "Step [3/")
    fault(first, second)
    if fault is freeze:
        (run,) = apart.finish(processes[:1], seen)
        signal_all(second, signal.SIGCONT)
        processes[1].communicate(timeout=DEADLINE_S)
        runs = [run]
    else:
        runs = apart.finish(processes, seen)
    for number, run in enumerate(runs):
        other = ("n2", "n1")[number]
        assert run.exit_code == 1, run.output
        assert told(run).startswith(f"node {other} not heard for ")
        assert told(run).endswith("no GPU is to blame")
        assert is_innocent(run)


@pytest.mark.parametrize("fault", [kill, kill_first])
def test_a_node_whose_processes_are_killed_ends_the_other(
    scripted_apart: Job, fault: Fault
) -> None:
    apart = scripted_apart
    processes = apart.start(LONG, **RESTING)
    seen = read_until(processes[0], "Step [3/")
    fault(*apart.nodes)
    runs = apart.finish(processes, seen)
    dead = 0 if fault is kill_first else 1
    left = runs[1 - dead]
    assert left.exit_code == 1, left.output
    assert f"node n{dead + 1} is gone: its launcher ended without a word" in told(left)
    assert is_innocent(left)


WORDS = "error: another rank"


@pytest.mark.slow
def test_ranks_of_torchrun_name_the_one_that_failed_first(apart: Job) -> None:
    options = ("logging.all_ranks=true", "training.max_steps=8")
    first, second = apart.nodes
    processes = [
        *apart.torchrun(*options, only=first),
        *apart.torchrun(*options, "debug.drill=raise@2:CPU0", only=second),
    ]
    runs = apart.finish(processes)
    assert [run.exit_code for run in runs] == [1, 1]
    line = line_with(WORDS, runs[0].output)
    assert " on node " in line
    assert " failed first after 2 steps: " in line


@pytest.mark.slow
def test_ranks_of_torchrun_that_lose_the_cable_name_a_node(apart: Job) -> None:
    """torchrun itself stays for minutes: its agents wait for each other."""
    processes = apart.torchrun(LONG, SOON, "logging.all_ranks=true")
    read_until(processes[0], "Step [3/")
    lose(*apart.nodes)
    said = {line_with(WORDS, read_until(process, WORDS)) for process in processes}
    assert len(said) == 2
    for number in range(2):
        assert any(f"node {number} (" in line and "not heard for" in line for line in said), said
    for node in apart.nodes:
        signal_all(node, signal.SIGKILL)


def line_with(words: str, output: str) -> str:
    return next((line for line in output.splitlines() if words in line), output)
