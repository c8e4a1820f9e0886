"""One training job whose ranks share the model: a real one, and one that fails under torchrun. What
real ranks find out together is in tests/engine/test_rank_faults.py; what the launcher does with
ranks is in test_ddp, and here where it is another for shards."""

import json
import re
import signal

import pytest

from tests.e2e.conftest import Launcher
from tests.e2e.test_ddp import (
    LONG,
    RESTING,
    SOON,
    assert_named_alone,
    named,
    started_by_torchrun,
)
from tests.e2e.test_in_step import events
from tests.e2e.test_run import read_until
from tests.e2e.test_scripted import told_by

JOB = ("--mode", "fsdp")


def test_a_job_shares_one_model_and_says_what_it_compared(
    launcher: Launcher, scripted: Launcher
) -> None:
    """Scripted ranks tell what these tell, but for the names of shards."""
    run = launcher(*JOB, "training.save_last=true", "--run-dir", "real")
    assert run.exit_code == 0, run.output
    assert "2 CPU workers trained 4 steps of one job, 512 tokens; loss and gradient " in run.output
    assert "equal bit for bit in 4 of 4 steps; each shard stayed as each update" in run.output
    assert "or sums wrong (--mode replicate looks for it)" in run.output
    assert "a wrong gradient or update of a shard, which one rank alone holds" in run.output
    first, second = (
        [e for e in events(run.cwd / "real" / f"cpu{n}.events.jsonl") if e["kind"] == "step"]
        for n in range(2)
    )
    assert [step["loss"] for step in first] == [step["loss"] for step in second]
    assert first[0]["taken"].startswith("shard 0 of 2: ")
    assert second[0]["taken"].startswith("shard 1 of 2: ")
    assert (run.cwd / ".checkpoints" / "last" / "manifest.json").is_file()
    as_real = scripted(*JOB, "training.save_last=true")
    assert as_real.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    assert told_by(as_real.directory) == told_by(run.cwd / "real")


@pytest.mark.slow
def test_under_torchrun_the_others_leave_when_the_rank_that_failed_has_its_evidence(
    launcher: Launcher,
) -> None:
    drill = "debug.drill=inf_weight@2:CPU1"
    done = started_by_torchrun(launcher, ("--standalone",), "launch.mode=fsdp", drill)
    assert done.returncode == 1
    changed = (
        r"failed first after \d steps: \S+w2\.weight\[1024:2048\] changed \(more than one bit\)"
    )
    assert re.search(changed, done.stdout + done.stderr), done.stdout + done.stderr
    _, first, root = done.stderr.partition("Root Cause")
    assert first
    assert "exitcode  : 21 " in root
    kept = launcher.cwd / ".checkpoints" / "cpu1" / "dossier" / "manifest.json"
    assert not json.loads(kept.read_text()).get("shortened")


@pytest.mark.parametrize(
    ("kind", "worker", "code"), [("kill", "CPU1", 137), ("nan", "CPU1", 20), ("flip", "CPU0", 21)]
)
def test_the_rank_that_failed_first_is_named_and_no_other(
    scripted: Launcher, kind: str, worker: str, code: int
) -> None:
    run = scripted(*JOB, f"debug.drill={kind}@2:{worker}")
    assert_named_alone(run, worker, code)


def test_a_rank_that_hangs_is_the_one_that_did_not_come(scripted: Launcher) -> None:
    run = scripted(*JOB, "debug.drill=hang@2:CPU0", SOON)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU0"]


def test_a_request_to_end_blames_no_rank(scripted: Launcher) -> None:
    process = scripted.start(*JOB, LONG, **RESTING)
    seen = read_until(process, "Step [3/")
    process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 128 + signal.SIGINT, run.output
    assert named(run) == []


def test_copies_of_a_shard_are_compared(scripted: Launcher) -> None:
    """A bit of a summed gradient, in one of two copies: neither can be named."""
    four = (*JOB, "--workers", "4", "launch.fsdp.shard_size=2", "training.max_steps=3")
    run = scripted(*four, "debug.drill=flip_gradient@1:CPU2")
    assert run.exit_code == 23, run.output
    assert "(bit 16 of value 0), and no majority tells which is right: CPU0 " in run.output
    assert {run.verdicts()[name] for name in ("CPU1", "CPU3")} <= {"PASS", "STOPPED"}


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
    scripted: Launcher, arguments: tuple[str, ...], said: str
) -> None:
    run = scripted(*JOB, *arguments)
    assert run.exit_code == 2
    assert said in run.output.splitlines()[-1]
