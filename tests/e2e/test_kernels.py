"""Kernels that err, in real workers: noticed before the first step."""

import json
import subprocess
import sys

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import IN_WORKERS, ROOT, Launcher, Run

FAILED = "attention kernel sdpa failed its trial: it "
SAID = {
    "bits": "gave other bits of dk in 3 equal calls",
    "nan": "numbers of dk that are not finite",
    "raise": "raised RuntimeError: no kernel image is available",
    "constant": "gave dk that is off by 0.01 of its size (0.001 is allowed)",
}


def start(launcher: Launcher, faults: dict[str, str], *more: str, **env: str) -> Run:
    env |= {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "KERNEL": json.dumps(faults)}
    return launcher("training.max_steps=2", *more, **env)


def told(run: Run, worker: str) -> str:
    """The line of its trial."""
    (line,) = [line for line in run.lines(f"[{worker}] ") if FAILED in line]
    return line


def test_kernels_that_err_are_told_and_the_next_ones_train(launcher: Launcher) -> None:
    faults = {f"CPU{number}": fault for number, fault in enumerate(("nan", "raise", "constant"))}
    run = start(launcher, faults, "--workers", "3", "system.deterministic=false")
    assert run.exit_code == 0, run.output
    rows = {row["name"]: row["detail"] for row in run.report()["workers"]}
    for worker, fault in faults.items():
        assert SAID[fault] in told(run, worker)
        assert rows[worker]["attention_backend"] == "eager"
        assert SAID[fault] in rows[worker]["trial of attention kernel sdpa"]


def test_workers_whose_kernels_lie_alike_are_compared_and_pass(launcher: Launcher) -> None:
    run = start(launcher, dict.fromkeys(("CPU0", "CPU1"), "bits"))
    assert run.exit_code == 0, run.output
    assert SAID["bits"] in told(run, "CPU1")
    assert "attention eager (the next one that passed its trial)" in run.output
    assert "equal bit for bit in 2 of 2 steps" in run.output


SUSPECTED = ("SUSPECT", "unknown", "MONITOR", "not replayed")
NAMED = "model.attention_backend=sdpa"


def rows(run: Run) -> dict[str, tuple[str | None, ...]]:
    keys = ("verdict", "cause_class", "severity", "repeat")
    return {row["name"]: tuple(row[key] for key in keys) for row in run.report()["workers"]}


@pytest.mark.parametrize("more", [(), (NAMED,)], ids=["auto", "named"])
def test_a_kernel_that_errs_on_one_of_three_makes_it_a_suspect(
    launcher: Launcher, more: tuple[str, ...]
) -> None:
    """One that may take no other kernel ends by itself, and is judged by the same."""
    run = start(launcher, {"CPU1": "bits"}, "--workers", "3", "launch.replay_s=60", *more)
    assert run.exit_code == 21, run.output
    said = f"CPU1: its attention kernel sdpa {SAID['bits']}; 2 equals passed"
    assert run.output.rstrip().endswith(f"[launcher] SUSPECT: {said} (exit code 21)")
    found = rows(run)
    assert found["CPU1"] == SUSPECTED
    # They may have come to their end before the last of them told its trial.
    assert {found[name][0] for name in ("CPU0", "CPU2")} <= {"STOPPED", "PASS"}
    report = run.report()
    assert (report["culprits"], report["replays"]) == (["CPU1"], [])
    assert report["disagreement"]["bits"]["CPU0"] == "passed"
    again = subprocess.run(
        [sys.executable, "-m", "launcher", "report", str(run.directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (again.returncode, again.stdout.count(said)) == (21, 1), again.stdout + again.stderr
    page = (run.directory / "report.html").read_text()
    assert "Before the first step" in page
    assert "kernels are tried anew" in page


@pytest.mark.parametrize("more", [(), (NAMED,)], ids=["auto", "named"])
def test_of_two_workers_nothing_tells_whether_it_is_the_gpu_or_the_kernel(
    launcher: Launcher, more: tuple[str, ...]
) -> None:
    run = start(launcher, {"CPU1": "nan"}, *more)
    assert run.exit_code == 23, run.output
    assert {found[:3] for found in rows(run).values()} == {("INCONCLUSIVE", "unknown", "MONITOR")}
    assert "CPU1: its attention kernel sdpa gave" in run.output
    assert "CPU0 passed; no majority of equals passed" in run.output


def test_a_fused_adamw_that_errs_on_one_of_three_makes_it_a_suspect(launcher: Launcher) -> None:
    run = start(launcher, {}, "--workers", "3", UPDATE="CPU2")
    assert run.exit_code == 21, run.output
    assert "CPU2: its fused AdamW changed weights in a step that it must refuse" in run.output
    assert rows(run)["CPU2"] == SUSPECTED


def test_the_others_go_on_without_the_suspect(launcher: Launcher) -> None:
    more = ("--workers", "3", "launch.on_suspect=continue")
    run = start(launcher, {"CPU1": "raise"}, *more)
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "SUSPECT", "CPU2": "PASS"}
    assert "the others go on without CPU1" in run.output


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_kernel_that_was_named_and_errs_everywhere_is_refused(
    launcher: Launcher, workers: str
) -> None:
    faults = dict.fromkeys(("CPU0", "CPU1"), "bits")
    run = start(launcher, faults, "--workers", workers, NAMED)
    assert run.exit_code == 2, run.output
    assert f"in its trial at the start it {SAID['bits']}" in run.output
    assert "Traceback" not in run.output
    assert "SUSPECT" not in run.output


LOST = "raised AcceleratorError: CUDA error: an illegal memory access was encountered"


def test_a_device_that_is_lost_in_a_trial_is_no_fault_of_the_settings(launcher: Launcher) -> None:
    """Nor of the kernels that would be tried after it."""
    run = start(launcher, {"CPU0": "lose"}, "--workers", "1")
    assert run.exit_code == 1, run.output
    said = f"cpu computes no more since the trial of attention kernel sdpa, which {LOST}; where a"
    assert said in run.output
    assert "Traceback" not in run.output
    (row,) = run.report()["workers"]
    assert row["verdict"] == "FAIL"
    trials = [key for key in row["detail"] if key.startswith("trial of")]
    assert trials == ["trial of fused AdamW", "trial of attention kernel sdpa"]


def test_a_device_that_is_lost_in_a_trial_that_its_equals_passed_is_a_suspect(
    launcher: Launcher,
) -> None:
    run = start(launcher, {"CPU1": "lose"}, "--workers", "3")
    assert run.exit_code == 21, run.output
    assert f"CPU1: its attention kernel sdpa {LOST}; 2 equals passed" in run.output
    assert rows(run)["CPU1"] == SUSPECTED


def test_ranks_that_torchrun_starts_say_which_of_them_takes_other_kernels(
    launcher: Launcher,
) -> None:
    faults = {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "KERNEL": '{"CPU1": "nan"}', "UPDATE": "CPU1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *(str(ROOT / "pretrain_main.py"), "--config", str(launcher.config)),
        ],
        cwd=launcher.cwd,
        env=launcher.env | faults,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1, done.stderr  # torchrun's own
    assert "exitcode  : 2 " in done.stderr
    assert (
        "rank 0: attention sdpa (ScaledDotProductFlashAttentionForCpu), AdamW fused; rank 1: "
        in (done.stderr)
    )
    assert "rank 1: attention eager, AdamW plain (fused AdamW failed its trial: it " in done.stderr


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_rank_whose_trial_never_ends_is_the_one_that_is_silent(
    launcher: Launcher, mode: str
) -> None:
    run = start(launcher, {"CPU1": "hang"}, "--mode", mode, "--hang-timeout", "4")
    assert run.exit_code == 124, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert "Traceback" not in run.output
    assert "SUSPECT" not in run.output


def test_a_kernel_that_never_returns_ends_at_the_limit_of_silence(launcher: Launcher) -> None:
    run = start(launcher, {"CPU0": "hang"}, "--workers", "1", "--hang-timeout", "4")
    assert run.exit_code == 124, run.output
    assert "silent" in run.output
    assert "spoilt (sitecustomize.py" in run.output


def test_a_rank_whose_kernel_errs_is_named_before_ranks_meet(launcher: Launcher) -> None:
    more = ("--workers", "3", "launch.mode=ddp", NAMED, "training.batch_size=3")
    run = start(launcher, {"CPU2": "raise"}, *more)
    assert run.exit_code == 21, run.output
    assert f"CPU2: its attention kernel sdpa {SAID['raise']}; 2 equals passed" in run.output
    assert rows(run)["CPU2"] == SUSPECTED
