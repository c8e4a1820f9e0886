"""One training job on all places: real ranks over gloo, that fail in each way, and go on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher, Run, launcher_in, pid_of
from tests.e2e.test_in_step import events
from tests.e2e.test_run import read_until
from tests.ports import free_port

JOB = ("--mode", "ddp")
SOON = "launch.rank_timeout_s=3"
"""For a rank that never comes: ours take milliseconds."""
LONG = "training.max_steps=100000"
SLEEPS = ("35", "230")
"""nanosleep and clock_nanosleep of x86-64."""


def losses(directory: Path, worker: str = "cpu0") -> dict[int, str]:
    found = events(directory / f"{worker}.events.jsonl")
    return {e["step"]: e["loss"] for e in found if e["kind"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """A job of 4 steps, for tests that read what it did."""
    run = launcher_in(tmp_path_factory.mktemp("undisturbed"), token_cache)(*JOB)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture(scope="module")
def undisturbed_8(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """The same, of 8: another schedule."""
    launcher = launcher_in(tmp_path_factory.mktemp("undisturbed_8"), token_cache)
    run = launcher(*JOB, "training.max_steps=8")
    assert run.exit_code == 0, run.output
    return run


def named(run: Run) -> list[str]:
    culprits: list[str] = run.report()["culprits"]
    return culprits


def test_a_job_trains_one_model_and_says_what_it_compared(launcher: Launcher) -> None:
    run = launcher(*JOB, "training.save_last=true")
    assert run.exit_code == 0, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    assert "2 CPU workers trained 4 steps of one job, 512 tokens; loss, gradients, " in run.output
    assert "equal bit for bit in 4 of 4 steps" in run.output
    assert "what one rank computes wrong before gradients are summed (launch.aud" in run.output
    assert len(run.lines("[CPU0] Step [")) == 4
    assert not run.lines("[CPU1]")
    assert sorted(p.name for p in (run.cwd / ".checkpoints").iterdir() if p.suffix) == ["last.pt"]
    steps = [e for e in events(run.directory / "cpu1.events.jsonl") if e["kind"] == "step"]
    assert all(e["own_loss"] != e["loss"] and "wait_ms" in e for e in steps)


def test_every_rank_prints_where_that_is_asked_for(launcher: Launcher) -> None:
    run = launcher(*JOB, "logging.all_ranks=true", "training.max_steps=1")
    assert run.lines("[CPU0] Step [")
    assert run.lines("[CPU1] Step [")


@pytest.mark.parametrize(
    ("kind", "worker", "code"),
    [
        ("raise", "CPU1", 1),
        ("exit7", "CPU0", 7),
        ("kill", "CPU1", 137),
        ("nan", "CPU1", 20),
        ("loss_nan", "CPU0", 20),
        ("nan_forward", "CPU1", 20),
        ("flip", "CPU1", 21),
        ("flip_moment", "CPU0", 21),
    ],
)
def test_the_rank_that_failed_first_is_named_and_no_other(
    launcher: Launcher, kind: str, worker: str, code: int
) -> None:
    run = launcher(*JOB, f"debug.drill={kind}@2:{worker}")
    assert_named_alone(run, worker, code)


def assert_named_alone(run: Run, worker: str, code: int) -> None:
    """Of a job of two, and the other one says nothing of a fault."""
    assert run.exit_code == code, run.output
    assert named(run) == [worker]
    other = "CPU1" if worker == "CPU0" else "CPU0"
    assert run.verdicts()[other] == "STOPPED"
    assert "Traceback" not in "\n".join(run.lines(f"[{other}]"))


def test_a_bit_of_a_summed_gradient_names_its_rank_step_and_tensor(launcher: Launcher) -> None:
    run = launcher(*JOB, "--workers=3", "debug.drill=flip_gradient@2:CPU1")
    assert run.exit_code == 21, run.output
    assert named(run) == ["CPU1"]
    tensor = "layers.0.feed_forward.w2.weight"
    assert f"step 2: CPU1 differs in the gradient of {tensor} (bit 16 of value 0)" in run.output


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_that_is_not_finite_on_one_rank_alone_is_told_by_it(
    launcher: Launcher, num_ranks: int
) -> None:
    """The others have seen nothing: they go on to their next step, and wait there. It asked them
    who had it too, in a collective of another size, and gloo ended it by SIGABRT."""
    drill = "debug.drill=flip_gradient@2:CPU0:layers.0.attention_norm.weight:30"
    run = launcher(*JOB, f"--workers={num_ranks}", drill)
    assert run.exit_code == 20, run.output
    assert named(run) == ["CPU0"]
    assert "step 2" in run.report()["summary"]
    assert "layers.0.attention_norm" in run.report()["summary"]


@pytest.mark.parametrize("fingerprints", ["full", "off"])
def test_what_spreads_by_the_sum_is_found_by_an_audit(
    launcher: Launcher, fingerprints: str
) -> None:
    fault = (
        "--workers=3",
        "debug.drill=flip_activation@2:CPU1",
        f"debug.fingerprints={fingerprints}",
    )
    unseen = launcher(*JOB, *fault, "--run-dir", "unseen")
    assert unseen.exit_code == 0, unseen.output
    run = launcher(*JOB, *fault, "launch.audit_interval=2")
    assert run.exit_code == 21, run.output
    assert named(run) == ["CPU1"]
    assert "step 2: CPU1 differs in the gradient of " in run.output
    assert " in an audit " in run.output


def test_an_audit_changes_no_bit(launcher: Launcher, undisturbed: Run) -> None:
    audited = launcher(*JOB, "launch.audit_interval=1")
    assert audited.exit_code == 0, audited.output
    assert losses(undisturbed.directory) == losses(audited.directory)
    assert "but for audits every 1 steps" in audited.output


def test_a_rank_that_hangs_is_the_one_that_did_not_come(launcher: Launcher) -> None:
    run = launcher(*JOB, "debug.drill=hang@2:CPU1", SOON)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU1"]
    told = "CPU1 did not come where the others waited (CPU0: another rank did not come in 3 s), in "
    assert told in run.output
    assert "inject.py" in (run.directory / "cpu1.stacks.txt").read_text()
    assert "distributed" in (run.directory / "cpu0.stacks.txt").read_text()


def test_a_rank_that_is_stopped_is_named(launcher: Launcher) -> None:
    process = launcher.start(*JOB, LONG, SOON)
    seen = read_until(process, "Step [3/")
    os.kill(pid_of("CPU1", launcher.cwd / "run"), signal.SIGSTOP)
    run = launcher.finish(process, seen)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU1"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_blames_no_rank(launcher: Launcher, signum: signal.Signals) -> None:
    process = launcher.start(*JOB, LONG)
    seen = read_until(process, "Step [3/")
    process.send_signal(signum)
    run = launcher.finish(process, seen)
    assert run.exit_code == 128 + signum, run.output
    assert named(run) == []
    assert set(run.verdicts().values()) == {"STOPPED"}


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
    one_more = (f"training.max_steps={len(first) + 1}", "--resume", "auto")
    again = launcher(*JOB, *one_more, "--run-dir", "again")
    assert again.exit_code == 0, again.output
    assert list(losses(launcher.cwd / "again")) == [len(first)]


def test_a_job_that_was_killed_goes_on_to_the_same_bits(
    launcher: Launcher, undisturbed_8: Run
) -> None:
    whole = losses(undisturbed_8.directory)
    saves = ("training.save_interval=2", "training.max_steps=8")
    killed = launcher(*JOB, *saves, "debug.drill=kill@5:CPU0", "--run-dir", "killed")
    assert killed.exit_code == 137
    rest = launcher(*JOB, *saves, "--resume", "auto", "--run-dir", "rest")
    assert rest.exit_code == 0, rest.output
    found = losses(launcher.cwd / "rest")
    assert found == {step: loss for step, loss in whole.items() if step >= 4}


def test_a_failed_job_goes_on_from_its_newest_checkpoint(
    launcher: Launcher, undisturbed_8: Run
) -> None:
    stale = launcher.cwd / ".checkpoints" / "step_6.pt"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"of an earlier run")
    os.utime(stale, (1e9, 1e9))
    run = launcher(
        *(*JOB, "--max-restarts", "2", "training.save_interval=2", "training.max_steps=8"),
        *("debug.drill=kill@5:CPU1", "--run-dir", "jobs/model_check_logs_1_2"),
    )
    again = run.cwd / "jobs/model_check_logs_1_2"
    assert run.exit_code == 0, run.output
    assert "CPU1 failed first: killed by SIGKILL" in run.output
    (line,) = run.lines("[launcher] restart ")
    assert "restart 1 of 2: the job goes on from " in line
    assert line.endswith(".checkpoints/step_4.pt")
    report = json.loads((again / "restart_1/report.json").read_text())
    assert report["verdict"] == "PASS"
    first, second = losses(again), losses(again / "restart_1")
    assert first | second == losses(undisturbed_8.directory)
    assert list(second) == [4, 5, 6, 7]
    listed = json.loads(launcher.verb("runs", "--parent", "jobs", "--json").stdout)
    assert [each["verdict"] for each in listed["runs"]] == ["PASS"]
    watched = launcher.verb("watch", str(again)).stdout
    assert "PASS: " in watched
    assert "restart_1" in watched


def test_a_job_is_not_restarted_for_what_settings_did(launcher: Launcher) -> None:
    run = launcher(*JOB, "--max-restarts", "3", "debug.drill=flip@2:CPU1:nothing.weight")
    assert run.exit_code == 2, run.output
    assert not run.lines("[launcher] restart ")


def test_it_ends_when_it_was_restarted_as_often_as_it_may(launcher: Launcher) -> None:
    run = launcher(*JOB, "--max-restarts", "1", "training.learning_rate=1e30")
    assert run.exit_code == 20, run.output
    assert len(run.lines("[launcher] restart ")) == 1
    assert "the job goes on from the start: no checkpoint was written" in run.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--", "true"), "--mode ddp is for our trainer"),
        (("launch.on_suspect=continue",), "no rank goes on without another one"),
        (("training.global_batch_size=6",), "2 ranks x batch_size 2 cannot share it evenly"),
        (("gradient_accumulation_steps=3",), "(2 and 4 would do; it suits 1, 3 ranks)"),
        (("--repeat", "2", "--max-restarts", "1"), "without --max-restarts"),
    ],
)
def test_what_a_job_cannot_be_asked_for_is_one_line(
    launcher: Launcher, arguments: tuple[str, ...], said: str
) -> None:
    run = launcher(*JOB, *arguments)
    assert run.exit_code == 2
    assert said in run.output.splitlines()[-1]


def test_max_restarts_needs_a_job(launcher: Launcher) -> None:
    run = launcher("--max-restarts", "1")
    assert run.exit_code == 2
    assert "needs launch.mode=ddp" in run.output


def test_two_jobs_at_once_do_not_meet(launcher: Launcher) -> None:
    runs = [
        launcher.start(*JOB, "--run-dir", name, f"system.checkpoint_dir={name}_checkpoints")
        for name in ("one", "two")
    ]
    assert [launcher.finish(run).exit_code for run in runs] == [0, 0]
    assert losses(launcher.cwd / "one") == losses(launcher.cwd / "two")


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


def test_a_job_that_torchrun_restarts_goes_on_to_the_same_bits(
    launcher: Launcher, undisturbed_8: Run
) -> None:
    saves = ("training.max_steps=8", "training.save_interval=2", "training.resume=auto")
    restarts = ("--standalone", "--max-restarts=1")
    output = by_torchrun(launcher, restarts, *saves, "debug.drill=kill@5:CPU1")
    before, resumed, after = output.partition("Resumed from .checkpoints/step_4.pt")
    assert resumed
    steps = without_eta(undisturbed_8.lines("[CPU0] Step ["))
    assert all(step in before for step in steps[:4])
    assert all(step in after for step in steps[4:])


def tasks_of(
    launcher: Launcher, job: str, *more: str, ranks: range
) -> "list[subprocess.Popen[str]]":
    """As Slurm starts the tasks of a step of two on one machine."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--config", str(launcher.config)]
    tasks = [
        subprocess.Popen(
            [*command, *more],
            cwd=launcher.cwd,
            env=launcher.env | step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in ranks
    ]
    launcher.started += tasks
    return tasks


def test_srun_tells_its_tasks_their_ranks(launcher: Launcher) -> None:
    tasks = tasks_of(launcher, str(os.getpid()), ranks=range(2))
    outputs = [task.communicate(timeout=DEADLINE_S)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "[CPU0] Step [3/4]" in outputs[0]
    assert "Step [" not in outputs[1]


def test_a_rank_that_meets_another_job_is_told_so_and_does_not_join_it(launcher: Launcher) -> None:
    """Which has its port: rank 0 cannot listen there, and rank 1 finds somebody."""
    job = os.getpid()
    launcher.environ["MASTER_PORT"] = str(20_000 + job % 12_000)
    first = tasks_of(launcher, str(job), LONG, ranks=range(2))
    read_until(first[0], "Step [3/")
    (other,) = tasks_of(launcher, str(job + 1), ranks=range(1, 2))
    output, _ = other.communicate(timeout=DEADLINE_S)
    assert other.returncode == 2, output
    assert "the ranks of another job meet there" in output
    assert [task.poll() for task in first] == [None, None]


def test_kernels_that_may_vary_still_leave_replicas_that_agree(launcher: Launcher) -> None:
    run = launcher(*JOB, "system.deterministic=false")
    assert run.exit_code == 0, run.output
    assert "equal bit for bit in 4 of 4 steps" in run.output


def test_a_job_is_not_replayed(launcher: Launcher) -> None:
    run = launcher(*JOB, "debug.drill=flip@2:CPU1", "launch.replay_s=60")
    assert run.exit_code == 21, run.output
    assert "replay: " not in run.output
    asked = launcher.verb("replay", str(run.directory), "CPU1")
    assert asked.returncode == 2
    assert "a job of ranks is not replayed" in asked.stdout


def test_a_restart_takes_no_checkpoint_of_another_job_in_the_same_place(
    launcher: Launcher,
) -> None:
    """The first job holds .checkpoints; the second one writes beside it."""
    first = launcher.start(*JOB, LONG, "--run-dir", "first", "training.save_interval=1")
    read_until(first, "Step [3/")
    run = launcher(
        *(*JOB, "--run-dir", "second", "--max-restarts", "1", "training.save_interval=2"),
        "debug.drill=kill@3:CPU1",
    )
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=DEADLINE_S)
    assert run.exit_code == 0, run.output
    (line,) = run.lines("[launcher] restart ")
    assert line.endswith(".checkpoints/cpu0/step_2.pt")


@pytest.mark.parametrize("after", [1, 2])
def test_a_rank_that_stops_between_two_steps_is_named(launcher: Launcher, after: int) -> None:
    """The others wait where they tell each other what they read: that has no end of its own."""
    hooks = str(ROOT / "tests" / "e2e" / "in_workers")
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{hooks}", "STOPS_AFTER": f"CPU1 {after}"}
    run = launcher(*JOB, SOON, **env)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU1"]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_short_limit_of_silence_still_names_the_rank_that_is_stopped(
    launcher: Launcher, worker: int
) -> None:
    process = launcher.start(*JOB, LONG, "--hang-timeout", "8")
    seen = read_until(process, "Step [3/")
    os.kill(pid_of(f"CPU{worker}", launcher.cwd / "run"), signal.SIGSTOP)
    run = launcher.finish(process, seen)
    assert run.exit_code == 124, run.output
    assert named(run) == [f"CPU{worker}"]


@pytest.mark.parametrize(
    ("drill", "file"), [("raise@2:CPU0", "error.pt"), ("nan@2:CPU1", "cpu1/nan_grad_step_2.pt")]
)
def test_what_a_failure_has_saved_goes_on_as_a_job(
    launcher: Launcher, undisturbed: Run, drill: str, file: str
) -> None:
    launcher(*JOB, f"debug.drill={drill}", "--run-dir", "failed")
    run = launcher(*JOB, "--resume", f".checkpoints/{file}", "--run-dir", "rest")
    assert run.exit_code == 0, run.output
    whole = losses(undisturbed.directory)
    assert losses(launcher.cwd / "rest") == {s: whole[s] for s in (2, 3)}


def test_a_job_of_one_rank_goes_on_from_its_checkpoint_too(launcher: Launcher) -> None:
    run = launcher(
        *(*JOB, "--workers=1", "--max-restarts", "1", "training.save_interval=1"),
        "debug.drill=kill@3:CPU0",
    )
    assert run.exit_code == 0, run.output
    (line,) = run.lines("[launcher] restart ")
    assert line.endswith("step_3.pt")
    again = launcher.verb("report", str(run.directory))
    assert again.returncode == 0, again.stdout
    assert "[launcher] restart 1:" in again.stdout.splitlines()


def by_hand(launcher: Launcher, rank: int, port: int, size: int = 2) -> "subprocess.Popen[str]":
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "pretrain_main.py"), "--config", str(launcher.config)],
        cwd=launcher.cwd,
        env=launcher.env | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    launcher.started.append(process)
    return process


def test_a_port_that_somebody_has_is_told_with_exit_code_2(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = by_hand(launcher, 0, port := other.getsockname()[1])
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, output
    assert f"error: MASTER_PORT = {port}: rank 0 cannot listen there" in output
    assert "Traceback" not in output


def test_a_name_that_nobody_knows_is_told_and_not_waited_for(launcher: Launcher) -> None:
    launcher.environ["MASTER_ADDR"] = "no-such-node.invalid"
    (rank,) = tasks_of(launcher, str(os.getpid()), ranks=range(1, 2))
    output, _ = rank.communicate(timeout=DEADLINE_S)
    assert rank.returncode == 2, output
    assert "MASTER_ADDR = no-such-node.invalid: this machine cannot resolve it" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_hears_a_request_to_end(launcher: Launcher, rank: int) -> None:
    process = by_hand(launcher, rank, free_port())
    wait_until_it_looks(process.pid)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, output


def wait_until_it_looks(pid: int) -> None:
    """For the others: it sleeps between two looks, which it does nowhere before."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if Path(f"/proc/{pid}/syscall").read_text().split()[0] in SLEEPS:
            return
        time.sleep(0.001)
    raise AssertionError("it never looked")
