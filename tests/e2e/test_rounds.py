"""`--repeat`, `--soak`: the same run again and again, with one report of all rounds."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from launcher import run_dir
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher
from tests.e2e.test_run import read_until
from tests.e2e.test_watch import watch

FLIP = "flip_gradient@1:CPU0:layers.0.feed_forward.w2.weight:20"
"""Nothing in a run of one worker tells of it."""
FAILS_IN = "case $MODEL_CHECK_RUN_DIR in *{}) exit 7;; esac"


def in_rounds(**drills: dict[str, str]) -> dict[str, str]:
    return {"IN_ROUND": json.dumps(drills)}


def rates(report: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    return {worker["name"]: (worker["rounds"], worker["failed"]) for worker in report["workers"]}


def test_rounds_that_pass_are_compared_with_each_other(scripted: Launcher) -> None:
    run = scripted("--workers=1", "--repeat=3")
    assert run.exit_code == 0, run.output
    report = run.report()
    assert (report["verdict"], report["compared_steps"]) == ("PASS", 8)
    assert [each["name"] for each in report["rounds"]] == ["round_001", "round_002", "round_003"]
    assert rates(report) == {"CPU0": (3, [])}
    assert "3 rounds passed, each with the same bits" in run.lines("[launcher] ")[-1]
    assert len([line for line in run.lines("[launcher] ") if ": PASS: " in line]) == 3


def test_the_round_of_one_worker_that_gave_other_bits_is_named(scripted: Launcher) -> None:
    run = scripted("--workers=1", "--repeat=3", **in_rounds(round_002={"CPU0": FLIP}))
    assert run.exit_code == 21, run.output
    report = run.report()
    assert (report["verdict"], report["culprits"]) == ("SUSPECT", ["CPU0"])
    assert [each["verdict"] for each in report["rounds"]] == ["PASS"] * 3
    assert report["differences"] == [
        {"worker": "CPU0", "rounds": ["round_002"], "step": 1, "is_minority": True}
    ]
    assert "round_002 gave other bits than most, from step 1 on" in report["summary"]
    again = scripted.verb("report", "run")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (21, run.output.splitlines()[-1])


def test_rounds_go_on_after_one_that_names_a_worker(scripted: Launcher) -> None:
    drills = in_rounds(round_002={"CPU2": "flip@2:CPU2"})
    run = scripted("--workers=3", "--max-steps=12", "--repeat=3", **drills)
    assert run.exit_code == 21, run.output
    report = run.report()
    assert rates(report) == {"CPU0": (2, []), "CPU1": (2, []), "CPU2": (3, ["round_002"])}
    assert report["culprits"] == ["CPU2"]
    assert "CPU2: failed in 1 of 3 rounds (33%): round_002" in run.output
    assert run.lines("[launcher] ")[-1].startswith(
        "[launcher] SUSPECT: CPU2 failed in 1 of 3 rounds;"
    )


def test_three_in_a_row_are_enough(scripted: Launcher) -> None:
    run = scripted("--workers=1", "--repeat=9", "--", "false")
    assert run.exit_code == 1, run.output
    assert rates(run.report()) == {"CPU0": (3, ["round_001", "round_002", "round_003"])}


def test_a_command_of_ones_own_has_rates_too(scripted: Launcher) -> None:
    script = FAILS_IN.format("round_003")
    run = scripted("--workers=1", "--repeat=5", "--", "bash", "-c", f"echo $RANDOM; {script}")
    assert run.exit_code == 7, run.output
    assert rates(run.report()) == {"CPU0": (5, ["round_003"])}
    assert run.report()["differences"] == []


def test_settings_that_are_wrong_end_it_with_the_first_round(scripted: Launcher) -> None:
    refused = json.dumps([2, "data.dataset = no_such_file.txt: no such file"])
    run = scripted("--repeat=3", PREPARES_WITH=refused)
    assert run.exit_code == 2, run.output
    assert len(run.report()["rounds"]) == 1


def test_a_soak_ends_in_time(scripted: Launcher) -> None:
    run = scripted("--workers=1", "--soak=5s", "--", "sleep", "1")
    assert run.exit_code == 0, run.output
    assert 1 <= len(run.report()["rounds"]) <= 5


def test_a_soak_of_which_nothing_is_left_has_one_round(scripted: Launcher) -> None:
    run = scripted("--workers=1", "--soak=0.001", "--", "true")
    assert (run.exit_code, len(run.report()["rounds"])) == (0, 1), run.output


def test_ctrl_c_ends_the_round_and_all(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    script = "case $MODEL_CHECK_RUN_DIR in *round_002) echo here; sleep 600;; esac"
    process = scripted.start("--workers=1", "--repeat=9", "--", "bash", "-c", script)
    seen = read_until(process, "[CPU0] here")
    os.kill(process.pid, signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 130, run.output
    assert [each["exit_code"] for each in run.report()["rounds"]] == [0, 130]
    assert alive(run.directory) == []


def test_a_running_one_is_watched_and_not_cleared(launcher: Launcher, tmp_path: Path) -> None:
    """Its first round is over."""
    script = "case $MODEL_CHECK_RUN_DIR in *round_002) echo here; sleep 600;; esac"
    parent = tmp_path / "runs"
    directory = parent / "model_check_logs_1_2"
    process = launcher.start(
        "--workers=1", "--repeat=2", f"--run-dir={directory}", "--", "bash", "-c", script
    )
    read_until(process, "[CPU0] here")
    listed = launcher.verb("runs", "--parent", str(parent), "--json").stdout
    assert [run["verdict"] for run in json.loads(listed)["runs"]] == ["running"]
    assert "0 of 1" in launcher.verb("runs", "clear", "--parent", str(parent), "--days=0").stdout
    assert "still going" in launcher.verb("report", str(directory)).stdout
    with closing(watch(launcher, str(directory))) as terminal:
        terminal.until(lambda: "round_002" in terminal.seen)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 143
        assert "exit code 143" in terminal.rest()
        assert terminal.process.wait(timeout=DEADLINE_S) == 0
    assert "round_002" in launcher.verb("replay", str(directory)).stdout


def test_rounds_of_a_killed_launcher_have_a_report(launcher: Launcher) -> None:
    script = "case $MODEL_CHECK_RUN_DIR in *round_002) echo here; sleep 600;; esac"
    process = launcher.start("--workers=1", "--repeat=2", "--", "bash", "-c", script)
    read_until(process, "[CPU0] here")
    process.kill()
    process.wait()
    deadline = time.monotonic() + DEADLINE_S
    while "still going" in (again := launcher.verb("report", "run")).stdout:
        assert time.monotonic() < deadline
    assert again.returncode == 70, again.stdout
    assert "did not live to see the end" in again.stdout


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--repeat=0", "launch.repeat"),
        ("--soak=soon", "is no time"),
        ("--soak=-3m", "--soak"),
    ],
)
def test_what_is_no_number_of_rounds_is_one_message(
    scripted: Launcher, argument: str, message: str
) -> None:
    run = scripted(argument)
    assert run.exit_code == 2, run.output
    assert message in run.output
    assert len(run.output.splitlines()) == 1, run.output


def test_rounds_that_would_go_on_from_a_checkpoint_are_refused(scripted: Launcher) -> None:
    run = scripted("--repeat=2", "--resume=auto")
    assert run.exit_code == 2, run.output
    assert "without --resume" in run.output
    assert not run.directory.exists()


def test_rounds_are_in_their_order(tmp_path: Path) -> None:
    numbers = [1, 2, 10, 999, 1000]
    for number in reversed(numbers):
        run_dir.round_path(tmp_path, number).mkdir()
    (tmp_path / "round_x").mkdir()
    assert run_dir.rounds_in(tmp_path) == [run_dir.round_path(tmp_path, n) for n in numbers]
    assert run_dir.newest_part(tmp_path).name == "round_1000"
