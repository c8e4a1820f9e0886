"""Who is named when workers differ or fail: what is told late, and by workers that die or wait."""

import json
import os
import signal

import pytest

from tests.e2e.conftest import IN_WORKERS, ROOT, Launcher, Run, pid_of
from tests.e2e.test_in_step import wait_until_it_waited
from tests.e2e.test_run import read_until
from tests.launcher.supervise.lab import wait_until_stopped

NORM = "layers.0.attention_norm.weight"


def with_drills(launcher: Launcher, num_workers: int, drills: dict[str, str], **env: str) -> Run:
    """A run in which each worker has its own drill."""
    return launcher(f"--workers={num_workers}", **env_of(drills, **env))


def env_of(drills: dict[str, str], **env: str) -> dict[str, str]:
    return env | {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "DRILLS": json.dumps(drills)}


def flip(bit: int) -> str:
    return f"flip_gradient@2:all:{NORM}:{bit}"


def test_without_a_majority_nobody_is_named(scripted: Launcher) -> None:
    run = with_drills(scripted, 4, {"CPU2": flip(3), "CPU3": flip(4)})
    assert run.exit_code == 23, run.output
    assert set(run.verdicts().values()) == {"INCONCLUSIVE"}
    assert run.report()["culprits"] == []
    assert f"the gradient of {NORM}" in run.report()["summary"]
    assert run.report()["disagreement"]["step"] == 2


def test_a_worker_that_dies_while_a_difference_is_settled_hides_it_not(
    scripted: Launcher,
) -> None:
    run = with_drills(scripted, 3, {"CPU0": flip(3)}, DIES_WHEN_ASKED="CPU2")
    assert run.exit_code == 21, run.output
    verdicts = run.verdicts()
    assert (verdicts["CPU0"], verdicts["CPU2"]) == ("SUSPECT", "FAIL")
    assert verdicts["CPU1"] in ("STOPPED", "PASS")
    assert f"CPU0 differs in the gradient of {NORM}" in run.report()["summary"]


def test_a_death_decides_where_the_difference_names_nobody(scripted: Launcher) -> None:
    run = with_drills(scripted, 2, {"CPU0": flip(3)}, DIES_WHEN_ASKED="CPU1")
    assert run.exit_code == 137, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert run.report()["disagreement"]["step"] == 2


def test_a_flip_in_the_last_step_of_a_slow_worker_still_meets_its_witnesses(
    scripted: Launcher,
) -> None:
    """The others have finished seconds before."""
    last = 3
    process = scripted.start(
        *("launch.max_lead=2", "--workers=3"),
        **env_of({"CPU1": f"flip_gradient@{last}:CPU1:{NORM}:3"}, STOPS_AFTER="CPU1 1"),
    )
    directory = scripted.cwd / "run"
    seen = read_until(process, "[CPU1] Step [0/")
    slow = pid_of("CPU1", directory)
    wait_until_stopped(slow)
    for name in ("cpu0", "cpu2"):
        wait_until_it_waited(directory / f"{name}.events.jsonl", after_step=last)
    os.kill(slow, signal.SIGCONT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU1"]
    found = run.report()["disagreement"]
    assert (found["step"], found["quantity"]) == (last, "gradients")
    assert found["tensor"]["found"] == {"CPU1": [[0, 3]]}
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "SUSPECT", "CPU2": "PASS"}


@pytest.mark.parametrize(("late", "late_s"), [("CPU0", 0.3), ("CPU1", 2.0)])
def test_a_nan_that_both_meet_at_different_times_names_nobody(
    scripted: Launcher, late: str, late_s: float
) -> None:
    run = with_drills(
        scripted, 2, dict.fromkeys(("CPU0", "CPU1"), "nan@1"), LATE=f"{late} {late_s}"
    )
    assert run.exit_code == 20, run.output
    assert run.report()["culprits"] == []
    assert set(run.verdicts().values()) == {"INCONCLUSIVE"}
    assert classes(run) == {("software", "IGNORE")}
    assert "not a GPU" in run.report()["summary"]


def classes(run: Run) -> set[tuple[str, str]]:
    return {(w["cause_class"], w["severity"]) for w in run.report()["workers"]}
