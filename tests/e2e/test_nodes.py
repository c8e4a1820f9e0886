"""One training job on two nodes, a launcher on each, as srun starts them, with scripted ranks:
whatever fails, each of them ends in time with the same culprit. Real ranks on two nodes are in
test_ddp."""

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher, Run
from tests.e2e.nodes import LOOPBACK, Job, Node, hooked
from tests.e2e.test_ddp import LONG, RESTING, SOON, losses, named
from tests.e2e.test_run import read_until
from tests.ports import free_port

FIRST, SECOND = LOOPBACK


@pytest.fixture
def job(scripted: Launcher) -> Job:
    return Job(scripted)


def told(run: Run) -> str:
    return str(run.report()["summary"])


def test_nodes_share_the_ranks_and_say_so(job: Job) -> None:
    processes = [*job.start(workers=2, only=FIRST), *job.start(workers=1, only=SECOND)]
    first, second = job.finish(processes)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert losses(first.directory) == losses(second.directory)
    node = first.report()["run"]["part"]
    assert (node["name"], node["num_ranks"]) == ("n1", 3)
    assert node["ranks"] == {"CPU0": 0, "CPU1": 1}
    assert second.report()["run"]["part"]["ranks"] == {"CPU0": 2}
    assert list(node["hosts"]) == ["n1", "n2"]
    assert told(first).startswith("n1, node 1 of 2: 2 CPU workers trained 4 steps of one job")
    assert "; nodes equal bit for bit at 4 steps" in told(first)
    assert "; n1 has compared its bits with those of the other nodes" in told(second)
    again = job.launcher.verb("report", str(second.directory))
    assert again.returncode == 0, again.stdout
    watched = job.launcher.verb("watch", str(first.directory))
    assert "PASS: " in watched.stdout


@pytest.mark.parametrize(
    ("drill", "code", "words"),
    [
        ("exit7@2:CPU1", 7, "exit code 7"),
        ("nan@2:CPU1", 20, "(it met a NaN or Inf|step 2, CPU1: gradient not finite)"),
    ],
)
def test_the_rank_that_failed_first_is_named_on_every_node(
    job: Job, drill: str, code: int, words: str
) -> None:
    processes = [
        *job.start(workers=1, only=FIRST),
        *job.start(f"debug.drill={drill}", workers=2, only=SECOND),
    ]
    first, second = job.finish(processes)
    assert (first.exit_code, second.exit_code) == (code, code), first.output + second.output
    assert re.match(rf"CPU1 on n2 \(rank 2\) failed first in step 2: {words}", told(first))
    assert "CPU1 on n2 (rank 2) failed first: " in told(second)
    assert (named(first), named(second)) == ([], ["CPU1"])
    assert set(first.verdicts().values()) == {"STOPPED"}
    assert second.verdicts()["CPU0"] == "STOPPED"
    assert first.report()["verdict"] == second.report()["verdict"] == "FAIL"
    culprit = first.report()["elsewhere"]
    assert (culprit["node"], culprit["worker"], culprit["rank"]) == ("n2", "CPU1", 2)
    fleet = job.launcher.verb("report", str(first.directory), str(second.directory))
    assert fleet.returncode == code, fleet.stdout
    counted = json.loads((job.launcher.cwd / "fleet.json").read_text())
    found = {(each["worker"], each["verdict"]) for each in counted["findings"]}
    assert found == {("CPU1", "FAIL"), (None, "STOPPED")}


def test_a_rank_that_hangs_is_named_by_its_node(job: Job) -> None:
    """None of its own node waits for it."""
    processes = [
        *job.start(SOON, only=FIRST),
        *job.start(SOON, "debug.drill=hang@2:CPU0", only=SECOND),
    ]
    first, second = job.finish(processes)
    assert (first.exit_code, second.exit_code) == (124, 124), first.output + second.output
    assert named(second) == ["CPU0"]
    assert "CPU0 on n2 (rank 1) failed first" in told(first)
    assert "pretrain_main.py" in (second.directory / "cpu0.stacks.txt").read_text()


def test_bits_that_differ_name_a_node_where_most_others_agree(scripted: Launcher) -> None:
    job = Job(scripted, (FIRST, SECOND, Node(2)))
    processes = [
        *job.start(only=FIRST),
        *job.start("debug.drill=flip_gradient@2:CPU0", only=SECOND),
        *job.start(only=job.nodes[2]),
    ]
    runs = job.finish(processes)
    assert [run.exit_code for run in runs] == [21] * 3, [run.output for run in runs]
    odd = "CPU0 on n2 (rank 1) failed first in step 2: other "
    assert all(odd in told(run) for run in runs)
    assert runs[1].verdicts()["CPU0"] == "SUSPECT"
    # They may have come to their end before the first of them compared that step.
    assert {runs[n].verdicts()["CPU0"] for n in (0, 2)} <= {"STOPPED", "PASS"}
    assert [named(run) for run in runs] == [[], ["CPU0"], []]


def test_a_job_that_failed_goes_on_from_its_newest_checkpoint_on_all_nodes(
    job: Job, tmp_path: Path
) -> None:
    """The first node has chosen it, and its clock is an hour ahead of the file system's."""
    ahead = "import time\nreal = time.time\ntime.time = lambda: real() + 3600"
    options = ("--max-restarts", "1", "training.save_interval=2", "training.max_steps=6")
    processes = [
        *job.start(*options, only=FIRST, **hooked(tmp_path, ahead)),
        *job.start(*options, "debug.drill=kill@3:CPU0", only=SECOND),
    ]
    runs = job.finish(processes)
    assert [run.exit_code for run in runs] == [0, 0], [run.output for run in runs]
    for run, begin in zip(runs, ("restart 1 of 1: ", "n1 has chosen: "), strict=True):
        (line,) = run.lines(f"[launcher] {begin}the job goes on from ")
        assert line.endswith(".checkpoints/step_2.pt")
        assert list(losses(run.directory / "restart_1")) == [2, 3, 4, 5]


def test_a_job_goes_on_on_all_nodes_or_on_none(job: Job) -> None:
    processes = [
        *job.start("--max-restarts", "3", only=FIRST),
        *job.start("debug.drill=kill@1:CPU0", only=SECOND),
    ]
    runs = job.finish(processes)
    assert [run.exit_code for run in runs] == [137, 137], [run.output for run in runs]
    assert runs[0].lines("[launcher] no restart: another node of the job does not go on, ")
    assert not (runs[0].directory / "restart_1").exists()


def test_what_every_rank_meets_blames_none(job: Job) -> None:
    first, second = job.finish(job.start(DRILLS='{"CPU0": "nan@2:all:always"}'))
    assert (first.exit_code, second.exit_code) == (20, 20), first.output + second.output
    assert (named(first), named(second)) == ([], [])
    assert [run.report().get("elsewhere") for run in (first, second)] == [None, None]


def test_a_request_to_one_launcher_ends_all(job: Job) -> None:
    processes = job.start(LONG, **RESTING)
    seen = read_until(processes[0], "Step [3/")
    processes[1].send_signal(signal.SIGTERM)
    first, second = job.finish(processes, seen)
    assert (first.exit_code, second.exit_code) == (143, 143), first.output + second.output
    assert told(first) == "n2: SIGTERM received"
    assert {*first.verdicts().values(), *second.verdicts().values()} == {"STOPPED"}


def test_a_node_that_never_comes_is_named(job: Job) -> None:
    (process,) = job.start("--hang-timeout", "1", SOON, only=SECOND)
    (run,) = job.finish([process])
    assert run.exit_code == 1, run.output
    assert "node n1 did not come" in told(run)
    assert run.report()["verdict"] == "INCONCLUSIVE"


def test_a_launcher_that_is_killed_is_told_by_its_node(job: Job) -> None:
    """Its guardian ends its ranks. It is the one that the others meet at, and will not come again:
    no restart waits for it."""
    processes = job.start(LONG, "--max-restarts", "1", **RESTING)
    seen = read_until(processes[0], "Step [3/")
    processes[0].kill()
    first, second = job.finish(processes, seen)
    assert (first.exit_code, second.exit_code) == (-9, 1), second.output
    assert "node n1 is gone: its launcher ended without a word: no GPU is to blame" in told(second)
    assert second.report()["verdict"] == "INCONCLUSIVE"
    assert second.lines("[launcher] no restart: another node of the job does not go on, or is gone")


def test_nodes_that_were_asked_for_different_things_are_refused(job: Job) -> None:
    processes = [
        *job.start("training.learning_rate=1e-2", only=FIRST),
        *job.start("training.learning_rate=1e-3", only=SECOND),
    ]
    first, second = job.finish(processes)
    assert (first.exit_code, second.exit_code) == (2, 2)
    assert "nodes n1 and n2 were asked for different trainings: training.learning_rate" in told(
        first
    )
    assert told(first) == told(second)


def test_a_port_that_another_program_has_is_told_on_every_node(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        first, second = job.finish(job.start(MASTER_PORT=port))
    assert (first.exit_code, second.exit_code) == (2, 2), first.output + second.output
    assert f"port {port} of 127.0.0.1: the launchers of this job's nodes cannot meet" in told(first)
    assert f"port {port} of 127.0.0.1: another program answers there" in told(second)


def test_jobs_of_other_steps_do_not_meet(job: Job) -> None:
    """Even at one port. A request ends the one that waits."""
    port = str(free_port())
    waiting = job.start(only=FIRST, MASTER_PORT=port)
    seen = read_until(waiting[0], "waiting for the launchers of the other nodes")
    other = Job(job.launcher, step="1")
    (stranger,) = other.finish(other.start("--run-dir", "other", only=SECOND, MASTER_PORT=port))
    waiting[0].send_signal(signal.SIGTERM)
    (run,) = job.finish(waiting, seen)
    assert run.exit_code == 143, run.output
    assert stranger.exit_code == 2, stranger.output
    assert f"the nodes of job {job.number}.0 meet there" in stranger.output


def test_several_launchers_on_a_node_are_refused(job: Job) -> None:
    run = job.launcher("--mode", "ddp", **job.slurm(FIRST) | {"SLURM_STEP_NUM_TASKS": "4"})
    assert run.exit_code == 2
    assert "srun started 4 launchers on 2 nodes" in run.output
    assert "srun --ntasks-per-node=1" in run.output


def test_rounds_of_several_nodes_are_refused(job: Job) -> None:
    for run in job("launch.repeat=2"):
        assert run.exit_code == 2
        assert "a job on several nodes has no rounds" in run.output


def test_an_address_that_nobody_knows_is_one_line(job: Job) -> None:
    env = job.slurm(FIRST) | {"MASTER_ADDR": "no-such-node.invalid"}
    run = job.launcher("--mode", "ddp", **env)
    assert run.exit_code == 2
    assert "no-such-node.invalid: this machine cannot resolve" in run.output
    assert "Traceback" not in run.output


def test_a_plan_shows_the_share_of_its_node(job: Job) -> None:
    asked = ("--mode", "ddp", "--workers", "2", "--dry-run", "--json")
    run = job.launcher(*asked, **job.slurm(SECOND))
    plan = json.loads(run.output)
    ranks = [each["env"] for each in plan["processes"][1:]]
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in ranks] == [
        ("2", "0", "4"),
        ("3", "1", "4"),
    ]
    assert plan["run_dir"].endswith("run/node_1")
    assert any("ranks 2 to 3 of 4, if each has as many" in note for note in plan["notes"])
