"""One training job whose ranks share the model: real ranks over gloo, that fail in each way. What
it has in common with ddp is in test_ddp."""

import json
import os
import signal

import pytest

from tests.e2e.conftest import Launcher, pid_of
from tests.e2e.test_ddp import (
    LONG,
    SOON,
    assert_named_alone,
    by_torchrun,
    losses,
    named,
    started_by_torchrun,
    without_eta,
)
from tests.e2e.test_in_step import events
from tests.e2e.test_run import read_until

JOB = ("--mode", "fsdp")
W2 = "layers.0.feed_forward.w2"


def test_a_job_shares_one_model_and_says_what_it_compared(launcher: Launcher) -> None:
    """The same batches as ddp: torchrun starts the same job, by the same setting."""
    run = launcher(*JOB)
    assert run.exit_code == 0, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    assert "2 CPU workers trained 4 steps of one job, 512 tokens; loss and gradient " in run.output
    assert "equal bit for bit in 4 of 4 steps; each shard stayed as each update" in run.output
    assert "or sums wrong (--mode replicate looks for it)" in run.output
    first, second = (
        [e for e in events(run.directory / f"cpu{n}.events.jsonl") if e["kind"] == "step"]
        for n in range(2)
    )
    assert [step["loss"] for step in first] == [step["loss"] for step in second]
    assert first[0]["taken"].startswith("shard 0 of 2: ")
    assert second[0]["taken"].startswith("shard 1 of 2: ")
    started = by_torchrun(launcher, ("--standalone",), "launch.mode=fsdp")
    steps = [line for line in started.splitlines() if " Step [" in line]
    assert without_eta(steps) == without_eta(run.lines("[CPU0] Step ["))


@pytest.mark.parametrize(
    ("kind", "worker", "code", "said"),
    [
        ("raise", "CPU1", 1, "raised at step 2"),
        ("exit7", "CPU0", 7, ""),
        ("kill", "CPU1", 137, ""),
        ("nan", "CPU1", 20, f"{W2} (backward: gradient of its weight)"),
        ("loss_nan", "CPU0", 20, "born in loss"),
        ("nan_forward", "CPU1", 20, "born in layers.0"),
        ("flip", "CPU1", 21, f"{W2}.weight[1024:2048] changed (bit 16 of value 0)"),
        ("flip_moment", "CPU0", 21, f"{W2}.weight[0:1024]"),
    ],
)
def test_the_rank_that_failed_first_is_named_and_no_other(
    launcher: Launcher, kind: str, worker: str, code: int, said: str
) -> None:
    run = launcher(*JOB, f"debug.drill={kind}@2:{worker}")
    assert_named_alone(run, worker, code)
    assert said in run.output


@pytest.mark.parametrize(
    ("drill", "code", "said"),
    [
        ("inf_weight@2:CPU1", 20, f"born in {W2} (state: its weight)"),
        ("flip@2:CPU1:layers.0.attention.wq.weight:30", 21, "wq.weight[512:1024] changed (bit 30"),
    ],
)
def test_a_weight_that_spoils_the_step_of_all_is_told_by_the_rank_where_it_lies(
    launcher: Launcher, drill: str, code: int, said: str
) -> None:
    run = launcher(*JOB, f"debug.drill={drill}")
    assert run.exit_code == code, run.output
    assert named(run) == ["CPU1"]
    assert run.verdicts()["CPU0"] == "STOPPED"
    assert said in run.output
    assert "step 2: weights on rank 1 had changed, or are not finite" in run.output
    manifest = json.loads((run.directory / "dossier" / "cpu1" / "manifest.json").read_text())
    assert not manifest.get("shortened")


def test_under_torchrun_the_others_leave_when_the_rank_that_failed_has_its_evidence(
    launcher: Launcher,
) -> None:
    drill = "debug.drill=inf_weight@2:CPU1"
    done = started_by_torchrun(launcher, ("--standalone",), "launch.mode=fsdp", drill)
    assert done.returncode == 1
    assert "failed first after 2 steps: step 2, CPU1: loss not finite" in done.stdout + done.stderr
    _, first, root = done.stderr.partition("Root Cause")
    assert first
    assert "exitcode  : 20 " in root
    kept = launcher.cwd / ".checkpoints" / "cpu1" / "dossier" / "manifest.json"
    assert not json.loads(kept.read_text()).get("shortened")


def test_a_nan_that_comes_again_is_found_in_its_module_by_all_ranks_together(
    launcher: Launcher,
) -> None:
    wq = "layers.0.attention.wq"
    drill = f"debug.drill=nan_forward@2:CPU1:{wq}:always"
    run = launcher(*JOB, drill, "debug.dump_tensors=true")
    assert run.exit_code == 20, run.output
    assert named(run) == ["CPU1"]
    assert f"Born in {wq} (forward: its output)" in run.output
    assert "came again" in run.output
    kept = run.cwd / ".checkpoints" / "cpu1"
    assert (kept / "nan_grad_step_2.shards.pt").is_file()
    assert (kept / "debug" / "nan_debug_step_2.pkl").is_file()


@pytest.mark.parametrize("worker", ["CPU0", "CPU1"])
def test_a_rank_that_hangs_is_the_one_that_did_not_come(launcher: Launcher, worker: str) -> None:
    run = launcher(*JOB, f"debug.drill=hang@2:{worker}", SOON)
    assert run.exit_code == 124, run.output
    assert named(run) == [worker]


def test_a_rank_that_is_stopped_is_named(launcher: Launcher) -> None:
    process = launcher.start(*JOB, LONG, SOON)
    seen = read_until(process, "Step [3/")
    os.kill(pid_of("CPU1", launcher.cwd / "run"), signal.SIGSTOP)
    run = launcher.finish(process, seen)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU1"]


def test_a_request_to_end_blames_no_rank(launcher: Launcher) -> None:
    process = launcher.start(*JOB, LONG)
    seen = read_until(process, "Step [3/")
    process.send_signal(signal.SIGINT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 128 + signal.SIGINT, run.output
    assert named(run) == []


def test_copies_of_a_shard_are_compared(launcher: Launcher) -> None:
    """A bit of a summed gradient, in one of two copies: neither can be named."""
    four = (*JOB, "--workers", "4", "launch.fsdp.shard_size=2", "training.max_steps=3")
    run = launcher(*four, "debug.drill=flip_gradient@1:CPU2")
    assert run.exit_code == 23, run.output
    assert "(bit 16 of value 0), and no majority tells which is right: CPU0 " in run.output
    assert {run.verdicts()[name] for name in ("CPU1", "CPU3")} <= {"PASS", "STOPPED"}
    assert losses(run.directory, "cpu1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("training.sample_interval=2",), "holds the model whole"),
        (("--workers", "3", "launch.fsdp.shard_size=2"), "3 ranks are no whole number of copies"),
        (("launch.audit_interval=1",), "launch.mode=ddp"),
        (("--", "true"), "--mode fsdp is for our trainer"),
    ],
)
def test_what_a_job_cannot_be_asked_for_is_one_line(
    launcher: Launcher, arguments: tuple[str, ...], said: str
) -> None:
    run = launcher(*JOB, *arguments)
    assert run.exit_code == 2
    assert said in run.output.splitlines()[-1]
