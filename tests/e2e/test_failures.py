"""What the launcher does with workers that fail, hang, differ or are slow, and with signals to
itself: real processes, with the scripted trainer."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher
from tests.e2e.test_run import read_until

MANY = "training.max_steps=100000"


def test_a_worker_that_raises_fails_the_run_and_its_peer_is_stopped(scripted: Launcher) -> None:
    run = scripted("debug.drill=raise@1:CPU1", MANY)
    assert run.exit_code == 1, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "FAIL"}
    assert run.report()["culprits"] == ["CPU1"]
    assert "last lines of CPU1" in run.output
    assert run.output.rstrip().splitlines()[-1].startswith("[launcher] FAIL: ")


@pytest.mark.parametrize(("fault", "code"), [("kill", 137), ("exit7", 7)])
def test_the_exit_code_of_the_culprit_is_the_exit_code_of_the_run(
    scripted: Launcher, fault: str, code: int
) -> None:
    run = scripted(f"debug.drill={fault}@1:CPU0", MANY)
    assert run.exit_code == code, run.output
    assert run.verdicts() == {"CPU0": "FAIL", "CPU1": "STOPPED"}


def test_workers_that_all_end_with_one_exit_code_blame_no_gpu_and_22_means_nothing_of_ours(
    scripted: Launcher,
) -> None:
    code = "import time; time.sleep(0.2); raise SystemExit(22)"
    run = scripted("--workers", "4", "--", sys.executable, "-S", "-c", code)
    assert run.exit_code == 22, run.output
    assert set(run.verdicts().values()) == {"INCONCLUSIVE"}
    assert {(w["cause_class"], w["severity"]) for w in run.report()["workers"]} == {
        ("software", "IGNORE")
    }
    assert (run.report()["verdict"], run.report()["culprits"]) == ("FAIL", [])
    said = "every worker ended with exit code 22; the software or the settings, not a GPU"
    assert run.report()["summary"] == said


def test_trainers_that_all_end_in_one_step_without_a_word_blame_no_gpu(scripted: Launcher) -> None:
    run = scripted("debug.drill=exit7@1", "--workers", "3", MANY)
    assert run.exit_code == 7, run.output
    assert set(run.verdicts().values()) == {"INCONCLUSIVE"}
    assert (run.report()["verdict"], run.report()["culprits"]) == ("FAIL", [])


def test_of_two_workers_the_one_whose_weight_changed_is_named(scripted: Launcher) -> None:
    weight = "layers.0.attention.wq.weight"
    run = scripted(f"debug.drill=flip@1:CPU1:{weight}:0", MANY)
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "SUSPECT"}
    assert f"CPU1: {weight} changed (bit 0 of value 0)" in run.report()["summary"]


def test_of_two_workers_whose_gradients_differ_none_is_named(scripted: Launcher) -> None:
    weight = "layers.0.attention.wq.weight"
    run = scripted(f"debug.drill=flip_gradient@1:CPU1:{weight}:4", MANY)
    assert run.exit_code == 23, run.output
    assert run.verdicts() == {"CPU0": "INCONCLUSIVE", "CPU1": "INCONCLUSIVE"}
    found = run.report()["disagreement"]
    assert (found["step"], found["quantity"], found["tensor"]["name"]) == (1, "gradients", weight)
    assert run.report()["culprits"] == []


def test_a_nan_in_every_worker_blames_the_settings_and_no_worker(scripted: Launcher) -> None:
    run = scripted("debug.drill=nan@1")
    assert run.exit_code == 20, run.output
    assert (run.report()["culprits"], set(run.verdicts().values())) == ([], {"INCONCLUSIVE"})
    assert [w["cause_class"] for w in run.report()["workers"]] == ["software", "software"]
    assert "not a GPU" in run.report()["summary"]


@pytest.mark.parametrize(("fail_on", "code"), [("[]", 0), ("speed", 22)])
def test_a_slow_worker_is_warned_of_with_the_step_from_which_on_it_was(
    scripted: Launcher, fail_on: str, code: int
) -> None:
    run = scripted(
        "debug.drill=slow@12:CPU1:4x",
        *("--workers", "3", "training.max_steps=30", f"launch.fail_on={fail_on}"),
    )
    assert run.exit_code == code, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "WARN", "CPU2": "PASS"}
    slow = {worker["name"]: worker["slow"] for worker in run.report()["workers"]}
    assert [name for name, how in slow.items() if how] == ["CPU1"]
    assert (slow["CPU1"]["since_step"], slow["CPU1"]["ratio"]) == (12, 4)
    told = "slow: 4.00 x its equals since step 12"
    assert any(f"warning: CPU1: {told}" in line for line in run.lines("[launcher] "))
    assert told in (run.directory / "report.html").read_text()


def test_a_worker_that_hangs_is_named_and_the_run_ends_with_124(scripted: Launcher) -> None:
    run = scripted("debug.drill=hang@2:CPU0", "--hang-timeout", "3", MANY)
    assert run.exit_code == 124, run.output
    assert run.verdicts() == {"CPU0": "FAIL", "CPU1": "STOPPED"}
    assert re.search(r"\(limit \d+ s\), in wait \(pretrain_main.py:", run.report()["summary"])
    for name, calls in (("CPU0", "in _act"), ("CPU1", "in run")):
        file = run.directory / f"{name.lower()}.stacks.txt"
        assert calls in file.read_text()
        assert f"[launcher] {name}: evidence: {file}" in run.output.splitlines()


def test_ctrl_c_stops_everything_and_still_reports(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = scripted.start(MANY)
    seen = read_until(process, "Step [3/")
    process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 130, run.output
    assert set(run.verdicts().values()) == {"STOPPED"}
    assert run.report()["culprits"] == []
    assert alive(run.directory) == []
    assert "Traceback" not in run.output


def test_of_a_launcher_that_was_killed_the_report_still_tells_what_was_heard(
    scripted: Launcher,
) -> None:
    process = scripted.start(MANY, STOPS_AFTER="CPU0 0")  # or it sees the end
    read_until(process, "Step [0/")
    process.kill()
    scripted.finish(process)
    done = scripted.verb("report", str(scripted.cwd / "run"))
    assert done.returncode == 70, done.stdout
    assert "did not live to see the end" in done.stdout
    assert "FAIL" not in done.stdout
