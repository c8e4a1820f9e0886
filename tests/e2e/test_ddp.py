"""One training job on all places. What the launcher does with its ranks is shown with scripted
ones; real ones, over gloo, train each promise once. What they find out together of a fault is in
tests/engine/test_rank_faults.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher, Run, launcher_in, pid_of
from tests.e2e.nodes import LOOPBACK, Job
from tests.e2e.test_in_step import events
from tests.e2e.test_run import read_until
from tests.e2e.test_scripted import told_by

JOB = ("--mode", "ddp")
SOON = "launch.rank_timeout_s=3"
"""For a rank that never comes: ours take milliseconds."""
LONG = "training.max_steps=100000"
ONE = "system.num_threads=1"
"""Else it follows from the number of workers on a node, and bits from it."""
RESTING = {"RESTS": "0.02"}
"""Scripted ranks take no step in less, so that a long job costs little."""


def losses(directory: Path, worker: str = "cpu0") -> dict[int, str]:
    found = events(directory / f"{worker}.events.jsonl")
    return {e["step"]: e["loss"] for e in found if e["kind"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """A real job of 4 steps, for tests that read what it did."""
    run = launcher_in(tmp_path_factory.mktemp("undisturbed"), token_cache)(
        *JOB, ONE, "training.save_interval=2", "training.save_last=true"
    )
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """A real job in which one rank meets a NaN."""
    launcher = launcher_in(tmp_path_factory.mktemp("with_nan"), token_cache)
    return launcher(*JOB, "debug.drill=nan@2:CPU1")


def named(run: Run) -> list[str]:
    culprits: list[str] = run.report()["culprits"]
    return culprits


def assert_named_alone(run: Run, worker: str, code: int) -> None:
    """Of a job of two, and the other one says nothing of a fault."""
    assert run.exit_code == code, run.output
    assert named(run) == [worker]
    other = "CPU1" if worker == "CPU0" else "CPU0"
    assert run.verdicts()[other] == "STOPPED"
    assert "Traceback" not in "\n".join(run.lines(f"[{other}]"))


# -- real ranks


def test_a_job_trains_one_model_and_says_what_it_compared(undisturbed: Run) -> None:
    run = undisturbed
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    assert "2 CPU workers trained 4 steps of one job, 512 tokens; loss, gradients, " in run.output
    assert "equal bit for bit in 4 of 4 steps" in run.output
    assert "what one rank computes wrong before gradients are summed (launch.aud" in run.output
    assert len(run.lines("[CPU0] Step [")) == 4
    assert not run.lines("[CPU1]")
    saved = sorted(p.name for p in (run.cwd / ".checkpoints").iterdir() if p.suffix)
    assert saved == ["last.pt", "step_2.pt", "step_4.pt"]
    steps = [e for e in events(run.directory / "cpu1.events.jsonl") if e["kind"] == "step"]
    assert all(e["own_loss"] != e["loss"] and "wait_ms" in e for e in steps)


def test_a_rank_that_met_a_nan_is_named_and_no_other(with_nan: Run) -> None:
    assert_named_alone(with_nan, "CPU1", 20)


@pytest.mark.parametrize("worker", ["cpu0", "cpu1"])
def test_scripted_ranks_tell_what_real_ones_tell(
    scripted: Launcher, undisturbed: Run, with_nan: Run, worker: str
) -> None:
    saves = ("training.save_interval=2", "training.save_last=true")
    whole = scripted(*JOB, *saves, "--run-dir", "whole")
    assert told_by(whole.cwd / "whole", worker) == told_by(undisturbed.directory, worker)
    failed = scripted(*JOB, "debug.drill=nan@2:CPU1")
    assert told_by(failed.directory, worker) == told_by(with_nan.directory, worker)


def test_two_nodes_train_what_one_trains(launcher: Launcher, undisturbed: Run) -> None:
    first, second = (job := Job(launcher)).finish(job.start(ONE, "training.save_last=true"))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert losses(first.directory) == losses(second.directory) == losses(undisturbed.directory)
    assert "; nodes equal bit for bit at 4 steps" in str(first.report()["summary"])
    assert not second.lines("[CPU0] Step ["), "the first rank speaks for all"
    assert [node.name for node in LOOPBACK] == [*first.report()["run"]["part"]["hosts"]]


@pytest.mark.slow
def test_what_spreads_by_the_sum_is_found_by_an_audit(launcher: Launcher) -> None:
    fault = ("debug.drill=flip_activation@2:CPU1", "debug.fingerprints=off")
    audited = ("launch.audit_interval=2", "training.max_steps=3")
    run = launcher(*JOB, "--workers=3", *fault, *audited)
    assert run.exit_code == 21, run.output
    assert named(run) == ["CPU1"]
    assert "step 2: CPU1 differs in the gradient of " in run.output
    assert " in an audit " in run.output


@pytest.mark.slow
def test_a_real_rank_that_hangs_is_the_one_that_did_not_come(launcher: Launcher) -> None:
    run = launcher(*JOB, "debug.drill=hang@2:CPU1", SOON)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU1"]
    told = "CPU1 did not come where the others waited (CPU0: another rank did not come in 3 s), in "
    assert told in run.output
    assert "inject.py" in (run.directory / "cpu1.stacks.txt").read_text()
    assert "distributed" in (run.directory / "cpu0.stacks.txt").read_text()


@pytest.mark.slow
def test_a_notice_ends_all_ranks_after_the_same_step_and_saves(launcher: Launcher) -> None:
    process = launcher.start(*JOB, LONG, "training.save_on_signal=true")
    seen = read_until(process, "Step [3/")
    os.kill(pid_of("CPU1", launcher.cwd / "run"), signal.SIGUSR1)  # one rank alone is told
    run = launcher.finish(process, seen)
    assert run.exit_code == 0, run.output
    told = [line for line in run.output.splitlines() if line.startswith("[CPU") and "early" in line]
    assert len(told) == 1, "for all ranks"
    first, second = (losses(run.directory, name) for name in ("cpu0", "cpu1"))
    assert first == second
    assert (run.cwd / ".checkpoints" / "last.pt").is_file()


@pytest.mark.slow
def test_a_job_that_failed_goes_on_to_the_same_bits(launcher: Launcher, undisturbed: Run) -> None:
    saves = ("--max-restarts", "1", "training.save_interval=2")
    run = launcher(*JOB, ONE, *saves, "debug.drill=kill@3:CPU1")
    assert run.exit_code == 0, run.output
    first, second = losses(run.directory), losses(run.directory / "restart_1")
    assert first | second == losses(undisturbed.directory)
    assert list(second) == [2, 3]


def by_torchrun(launcher: Launcher, options: tuple[str, ...], *settings: str) -> str:
    """What two ranks print that torchrun starts."""
    done = started_by_torchrun(launcher, options, *settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started_by_torchrun(
    launcher: Launcher, options: tuple[str, ...], *settings: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options),
            *(str(ROOT / "pretrain_main.py"), "--config", str(launcher.config), *settings),
        ],
        cwd=launcher.cwd,
        env=launcher.env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def without_eta(lines: list[str]) -> list[str]:
    return [line.partition(" | ETA")[0] for line in lines]


def test_torchrun_starts_the_same_job(launcher: Launcher, undisturbed: Run) -> None:
    output = by_torchrun(launcher, ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"))
    steps = [line for line in output.splitlines() if " Step [" in line]
    assert without_eta(steps) == without_eta(undisturbed.lines("[CPU0] Step ["))


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_goes_on_to_the_same_bits(
    launcher: Launcher, undisturbed: Run
) -> None:
    saves = ("training.save_interval=2", "training.resume=auto")
    restarts = ("--standalone", "--max-restarts=1")
    output = by_torchrun(launcher, restarts, *saves, "debug.drill=kill@3:CPU1")
    before, resumed, after = output.partition("Resumed from .checkpoints/step_2.pt")
    assert resumed
    steps = without_eta(undisturbed.lines("[CPU0] Step ["))
    assert all(step in before for step in steps[:2])
    assert all(step in after for step in steps[2:])


@pytest.mark.slow
def test_srun_tells_its_tasks_their_ranks(launcher: Launcher) -> None:
    """As Slurm starts the tasks of a step of two on one machine."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--config", str(launcher.config)]
    tasks = [
        subprocess.Popen(
            [*command, "training.max_steps=1"],
            cwd=launcher.cwd,
            env=launcher.env | step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    launcher.started += tasks
    outputs = [task.communicate(timeout=DEADLINE_S)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "[CPU0] Step [0/1]" in outputs[0]
    assert "Step [" not in outputs[1]


# -- scripted ranks


def test_every_rank_prints_where_that_is_asked_for(scripted: Launcher) -> None:
    run = scripted(*JOB, "logging.all_ranks=true", "training.max_steps=1")
    assert run.lines("[CPU0] Step [")
    assert run.lines("[CPU1] Step [")


@pytest.mark.parametrize(
    ("kind", "worker", "code"),
    [
        ("raise", "CPU1", 1),
        ("exit7", "CPU0", 7),
        ("kill", "CPU1", 137),
        ("nan", "CPU0", 20),
        ("flip", "CPU1", 21),
        ("flip_moment", "CPU0", 21),
    ],
)
def test_the_rank_that_failed_first_is_named_and_no_other(
    scripted: Launcher, kind: str, worker: str, code: int
) -> None:
    run = scripted(*JOB, f"debug.drill={kind}@2:{worker}")
    assert_named_alone(run, worker, code)


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_a_bit_of_a_summed_gradient_names_its_rank_step_and_tensor(
    scripted: Launcher, deterministic: str
) -> None:
    """Ranks have the bits of one sum, whether or not kernels may vary."""
    kernels = f"system.deterministic={deterministic}"
    run = scripted(*JOB, "--workers=3", kernels, "debug.drill=flip_gradient@2:CPU1")
    assert run.exit_code == 21, run.output
    assert named(run) == ["CPU1"]
    tensor = "layers.0.feed_forward.w2.weight"
    assert f"step 2: CPU1 differs in the gradient of {tensor} (bit 16 of value 0)" in run.output


@pytest.mark.parametrize("worker", ["CPU0", "CPU1"])
def test_a_rank_that_is_stopped_is_named(scripted: Launcher, worker: str) -> None:
    run = scripted(*JOB, SOON, STOPS_AFTER=f"{worker} 1")
    assert run.exit_code == 124, run.output
    assert named(run) == [worker]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_blames_no_rank(scripted: Launcher, signum: signal.Signals) -> None:
    process = scripted.start(*JOB, LONG, **RESTING)
    seen = read_until(process, "Step [3/")
    process.send_signal(signum)
    run = scripted.finish(process, seen)
    assert run.exit_code == 128 + signum, run.output
    assert named(run) == []
    assert set(run.verdicts().values()) == {"STOPPED"}


def test_a_failed_job_goes_on_from_the_newest_checkpoint_of_its_own(scripted: Launcher) -> None:
    stale = scripted.cwd / ".checkpoints" / "step_6.pt"
    stale.parent.mkdir()
    stale.write_bytes(b"of another run")
    run = scripted(
        *(*JOB, "--max-restarts", "2", "training.save_interval=2", "training.max_steps=8"),
        *("debug.drill=kill@5:CPU1", "--run-dir", "jobs/model_check_logs_1_2"),
    )
    assert run.exit_code == 0, run.output
    assert "CPU1 failed first: killed by SIGKILL" in run.output
    (line,) = run.lines("[launcher] restart ")
    assert "restart 1 of 2: the job goes on from " in line
    assert line.endswith(".checkpoints/step_4.pt")
    again = run.cwd / "jobs/model_check_logs_1_2"
    report = json.loads((again / "restart_1/report.json").read_text())
    assert report["verdict"] == "PASS"
    assert [*losses(again / "restart_1")] == [4, 5, 6, 7]
    listed = json.loads(scripted.verb("runs", "--parent", "jobs", "--json").stdout)
    assert [each["verdict"] for each in listed["runs"]] == ["PASS"]
    watched = scripted.verb("watch", str(again)).stdout
    assert "PASS: " in watched
    assert "restart_1" in watched


def test_a_job_of_one_rank_goes_on_from_its_checkpoint_too(scripted: Launcher) -> None:
    run = scripted(
        *(*JOB, "--workers=1", "--max-restarts", "1", "training.save_interval=1"),
        "debug.drill=kill@3:CPU0",
    )
    assert run.exit_code == 0, run.output
    (line,) = run.lines("[launcher] restart ")
    assert line.endswith("step_3.pt")
    again = scripted.verb("report", str(run.directory))
    assert again.returncode == 0, again.stdout
    assert "[launcher] restart 1:" in again.stdout.splitlines()


def test_a_job_is_not_restarted_for_what_settings_did(scripted: Launcher) -> None:
    refused = json.dumps({"CPU1": [2, "debug.drill: nothing.weight is no parameter"]})
    run = scripted(*JOB, "--max-restarts", "3", ENDS=refused)
    assert run.exit_code == 2, run.output
    assert not run.lines("[launcher] restart ")


def test_it_ends_when_it_was_restarted_as_often_as_it_may(scripted: Launcher) -> None:
    always = json.dumps({name: "nan@1:all:always" for name in ("CPU0", "CPU1")})
    run = scripted(*JOB, "--max-restarts", "1", DRILLS=always)
    assert run.exit_code == 20, run.output
    assert len(run.lines("[launcher] restart ")) == 1
    assert "the job goes on from the start: no checkpoint was written" in run.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*JOB, "--", "true"), "--mode ddp is for our trainer"),
        ((*JOB, "launch.on_suspect=continue"), "no rank goes on without another one"),
        ((*JOB, "training.global_batch_size=6"), "2 ranks x batch_size 2 cannot share it evenly"),
        ((*JOB, "--repeat", "2", "--max-restarts", "1"), "without --max-restarts"),
        (("--max-restarts", "1"), "needs launch.mode=ddp"),
    ],
)
def test_what_a_job_cannot_be_asked_for_is_one_line(
    scripted: Launcher, arguments: tuple[str, ...], said: str
) -> None:
    run = scripted(*arguments)
    assert run.exit_code == 2
    assert said in run.output.splitlines()[-1]


def test_two_jobs_at_once_do_not_meet(scripted: Launcher) -> None:
    runs = [
        scripted.start(*JOB, "--run-dir", name, f"system.checkpoint_dir={name}_checkpoints")
        for name in ("one", "two")
    ]
    assert [scripted.finish(run).exit_code for run in runs] == [0, 0]
    assert losses(scripted.cwd / "one") == losses(scripted.cwd / "two")


def test_a_job_is_not_replayed(scripted: Launcher) -> None:
    run = scripted(*JOB, "debug.drill=flip@2:CPU1", "launch.replay_s=60")
    assert run.exit_code == 21, run.output
    assert "replay: " not in run.output
    asked = scripted.verb("replay", str(run.directory), "CPU1")
    assert asked.returncode == 2
    assert "a job of ranks is not replayed" in asked.stdout
