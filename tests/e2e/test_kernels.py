"""Kernels that fail their trials, noticed before the first step. The trials themselves are in
tests/models and tests/engine; here one real run, and what the launcher does with what workers say
of theirs."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import IN_WORKERS, ROOT, Launcher, Run

TRIAL = "trial of attention kernel sdpa"
NAN = "numbers of dk that are not finite"
BITS = "gave other bits of dk in 3 equal calls"
RAISED = "raised RuntimeError: no kernel image is available"
LOST = "raised AcceleratorError: CUDA error: an illegal memory access was encountered"
EAGER = {"attention_backend": "eager", "attention_kernel": "eager"}
SUSPECTED = ("SUSPECT", "unknown", "MONITOR", "not replayed")
THREE = ("--workers", "3", "training.max_steps=2")


def test_a_kernel_that_errs_is_told_and_the_next_one_trains(launcher: Launcher) -> None:
    """A real one. Where kernels may vary, what one takes is not compared with the others."""
    env = {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "KERNEL": json.dumps({"CPU1": "nan"})}
    run = launcher("training.max_steps=1", "system.deterministic=false", **env)
    assert run.exit_code == 0, run.output
    (line,) = [line for line in run.lines("[CPU1] ") if "attention kernel sdpa failed its" in line]
    assert NAN in line
    detail = {row["name"]: row["detail"] for row in run.report()["workers"]}["CPU1"]
    assert detail["attention_backend"] == "eager"
    assert NAN in detail[TRIAL]


def failing(found: dict[str, str], trial: str = TRIAL) -> dict[str, str]:
    """The environment in which these scripted workers found that of their kernel, and take the next
    one."""
    details: dict[str, dict[str, Any]] = {n: EAGER | {trial: shown} for n, shown in found.items()}
    return {"DETAILS": json.dumps(details)}


def refused(found: dict[str, str], code: int = 2) -> dict[str, str]:
    """The same of workers that may take no other one, and end."""
    ends = {n: [code, f"in its trial at the start it {shown}"] for n, shown in found.items()}
    return failing(found) | {"ENDS_AFTER_TRIALS": json.dumps(ends)}


def rows(run: Run) -> dict[str, tuple[str | None, ...]]:
    keys = ("verdict", "cause_class", "severity", "repeat")
    return {row["name"]: tuple(row[key] for key in keys) for row in run.report()["workers"]}


def test_workers_whose_kernels_lie_alike_are_compared_and_pass(scripted: Launcher) -> None:
    run = scripted("training.max_steps=2", **failing(dict.fromkeys(("CPU0", "CPU1"), BITS)))
    assert run.exit_code == 0, run.output
    assert "equal bit for bit in 2 of 2 steps" in run.output


@pytest.mark.parametrize("told", [failing, refused])
def test_a_kernel_that_errs_on_one_of_three_makes_it_a_suspect(
    scripted: Launcher, told: Any
) -> None:
    """One that may take no other kernel ends by itself, and is judged by the same."""
    run = scripted(*THREE, "launch.replay_s=0", **told({"CPU1": BITS}))
    assert run.exit_code == 21, run.output
    said = f"CPU1: its attention kernel sdpa {BITS}; 2 equals passed"
    assert run.output.rstrip().endswith(f"[launcher] SUSPECT: {said} (exit code 21)")
    found = rows(run)
    assert found["CPU1"] == SUSPECTED
    # They may have come to their end before the last of them told its trial.
    assert {found[name][0] for name in ("CPU0", "CPU2")} <= {"STOPPED", "PASS"}
    report = run.report()
    assert (report["culprits"], report["replays"]) == (["CPU1"], [])
    assert report["disagreement"]["bits"]["CPU0"] == "passed"
    again = scripted.verb("report", str(run.directory))
    assert (again.returncode, again.stdout.count(said)) == (21, 1), again.stdout
    page = (run.directory / "report.html").read_text()
    assert "Before the first step" in page
    assert "kernels are tried anew" in page


@pytest.mark.parametrize("told", [failing, refused])
def test_a_trial_is_made_again_beside_a_healthy_one(scripted: Launcher, told: Any) -> None:
    """Where the suspect ends by itself, too."""
    run = scripted("training.max_steps=2", "launch.replay_s=200", **told({"CPU1": BITS}))
    assert run.exit_code == 21, run.output
    again = f"replayed 6 times ({TRIAL}): CPU1 was wrong again in 6 of 6 replays; CPU0 never was"
    assert again in run.output
    said = f"CPU1: its attention kernel sdpa {BITS}; CPU0 passed"
    assert f"[launcher] FAIL: {said}; " in run.output
    assert rows(run)["CPU1"] == ("FAIL", "hardware", "ISOLATE", "persistent")
    again_of_report = scripted.verb("report", str(run.directory))
    assert (again_of_report.returncode, again_of_report.stdout.count(again)) == (21, 1)


@pytest.mark.parametrize("told", [failing, refused])
def test_of_two_workers_nothing_tells_whether_it_is_the_gpu_or_the_kernel(
    scripted: Launcher, told: Any
) -> None:
    run = scripted("training.max_steps=2", **told({"CPU1": f"gave {NAN}"}))
    assert run.exit_code == 23, run.output
    assert {found[:3] for found in rows(run).values()} == {("INCONCLUSIVE", "unknown", "MONITOR")}
    assert "CPU1: its attention kernel sdpa gave" in run.output
    assert "CPU0 passed; no majority of equals passed" in run.output


def test_a_fused_adamw_that_errs_on_one_of_three_makes_it_a_suspect(scripted: Launcher) -> None:
    shown = "changed weights in a step that it must refuse"
    details = {"CPU2": {"optimizer": "plain", "trial of fused AdamW": shown}}
    run = scripted(*THREE, DETAILS=json.dumps(details))
    assert run.exit_code == 21, run.output
    assert f"CPU2: its fused AdamW {shown}" in run.output
    assert rows(run)["CPU2"] == SUSPECTED


def test_the_others_go_on_without_the_suspect(scripted: Launcher) -> None:
    run = scripted(*THREE, "launch.on_suspect=continue", **failing({"CPU1": RAISED}))
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "SUSPECT", "CPU2": "PASS"}
    assert "the others go on without CPU1" in run.output


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_kernel_that_was_named_and_errs_everywhere_is_refused(
    scripted: Launcher, workers: str
) -> None:
    names = [f"CPU{number}" for number in range(int(workers))]
    run = scripted("--workers", workers, **refused(dict.fromkeys(names, BITS)))
    assert run.exit_code == 2, run.output
    assert f"in its trial at the start it {BITS}" in run.output
    assert "SUSPECT" not in run.output


def test_a_device_that_is_lost_in_a_trial_is_no_fault_of_the_settings(scripted: Launcher) -> None:
    run = scripted("--workers", "1", **refused({"CPU0": LOST}, code=1))
    assert run.exit_code == 1, run.output
    assert run.verdicts() == {"CPU0": "FAIL"}


def test_a_device_that_is_lost_in_a_trial_that_its_equals_passed_is_a_suspect(
    scripted: Launcher,
) -> None:
    run = scripted(*THREE, **refused({"CPU1": LOST}, code=1))
    assert run.exit_code == 21, run.output
    assert f"CPU1: its attention kernel sdpa {LOST}; 2 equals passed" in run.output
    assert rows(run)["CPU1"] == SUSPECTED


def test_a_rank_whose_kernel_errs_is_named_though_the_others_lost_it(scripted: Launcher) -> None:
    job = ("--workers", "3", "launch.mode=ddp", "training.batch_size=3")
    run = scripted(*job, **refused({"CPU2": RAISED}))
    assert run.exit_code == 21, run.output
    assert f"CPU2: its attention kernel sdpa {RAISED}; 2 equals passed" in run.output
    assert rows(run)["CPU2"] == SUSPECTED


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicate", "ddp", "fsdp"])
def test_a_worker_whose_trial_never_ends_is_the_one_that_is_silent(
    launcher: Launcher, mode: str
) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "KERNEL": json.dumps({"CPU1": "hang"})}
    run = launcher("--mode", mode, "--hang-timeout", "4", "training.max_steps=2", **env)
    assert run.exit_code == 124, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert "spoilt (sitecustomize.py" in run.output
    assert "SUSPECT" not in run.output
