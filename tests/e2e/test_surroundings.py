"""A run among odd surroundings: full disks, closed streams, few files, commands of a user's own,
other working directories, mistakes on the command line."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from model_check.config.load import Request, load, to_json
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher, pid_of
from tests.e2e.test_run import read_until
from tests.launcher.supervise.lab import wait_until_stopped


def test_a_typo_in_a_key_is_one_line_with_the_nearest_name_and_starts_nothing(
    launcher: Launcher,
) -> None:
    run = launcher("training.max_step=5")
    assert run.exit_code == 2
    assert run.output.splitlines() == [
        "[launcher] error: command line: training.max_step: no such setting; "
        "did you mean training.max_steps?"
    ]
    assert not run.directory.exists()


@pytest.mark.parametrize("drill", ["nan@1:CPU7", "nan@99"])
def test_a_drill_that_could_not_act_is_refused_before_anything_starts(
    launcher: Launcher, drill: str
) -> None:
    run = launcher(f"debug.drill={drill}")
    assert run.exit_code == 2
    assert len(run.output.splitlines()) == 1
    assert not run.directory.exists()


def test_a_cache_that_cannot_be_written_is_one_clear_line(launcher: Launcher) -> None:
    blocked = launcher.cwd / "file"
    blocked.write_text("not a directory")
    run = launcher(DATASET_CACHE_DIR=str(blocked / "cache"))
    assert run.exit_code == 2, run.output
    assert "Traceback" not in run.output
    assert run.report()["exit_code"] == 2
    verdict = run.output.splitlines()[-1]
    assert verdict.startswith("[launcher] FAIL: prepare failed: exit code 2: ")
    assert "data.cache_dir" in verdict


def test_a_working_directory_of_any_bytes_hides_no_nan(scripted: Launcher) -> None:
    cwd = scripted.cwd / os.fsdecode(b"b\xff")
    cwd.mkdir()
    run = replace(scripted, cwd=cwd)("debug.drill=nan@1:CPU1", "data.cache_dir=cache")
    assert run.exit_code == 20, run.output
    assert run.verdicts()["CPU1"] == "FAIL"


def test_the_settings_of_a_run_can_be_run_again(scripted: Launcher) -> None:
    first = scripted("--max-steps", "2", "--workers", "1")
    again = scripted("--config", f"{first.directory}/config.json", "--run-dir", "again")
    assert again.exit_code == 0, again.output
    other = scripted.cwd / "again" / "config.json"
    assert other.read_bytes() == (first.directory / "config.json").read_bytes()


def test_a_disk_that_is_full_before_the_start_is_one_clear_line(
    launcher: Launcher, small_disk: Path
) -> None:
    fill(small_disk)
    run = launcher("--run-dir", str(small_disk / "run"))
    assert run.exit_code == 2, run.output
    assert "No space left on device" in run.output
    assert "Traceback" not in run.output


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as filler:
        for size in (65536, 1024, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue


def fill_while_it_runs(
    scripted: Launcher, disk: Path, *arguments: str
) -> tuple[subprocess.Popen[str], str]:
    """Behind its step 4 CPU1 waits until the disk is full."""
    asked = ("--run-dir", str(disk / "run"), *arguments)
    process = scripted.start(*asked, STOPS_AFTER="CPU1 4")
    seen = read_until(process, "[CPU1] Step [3/")
    wait_until_stopped(slow := pid_of("CPU1", disk / "run"))
    fill(disk)
    os.kill(slow, signal.SIGCONT)
    return process, seen


def test_a_disk_that_fills_before_a_fault_is_replayed_hides_no_verdict(
    scripted: Launcher, small_disk: Path
) -> None:
    asked = ("--workers=3", "--max-steps=8", "debug.drill=flip@6:CPU1", "launch.replay_s=100")
    run = scripted.finish(*fill_while_it_runs(scripted, small_disk, *asked))
    assert run.exit_code == 21, run.output
    assert run.lines("[launcher] no report: ")
    assert not run.lines("[launcher] logs and report: ")
    assert run.lines("[launcher] logs: ")
    assert "CPU1 gave the right bits" in run.lines("[launcher] SUSPECT: CPU1: ")[0]


def test_a_disk_that_fills_during_the_run_changes_no_verdict(
    scripted: Launcher, small_disk: Path
) -> None:
    run = scripted.finish(*fill_while_it_runs(scripted, small_disk, "--max-steps=300"))
    assert run.exit_code == 0, run.output
    assert "No space left" in run.output
    last = [line for line in run.output.splitlines() if "Step [299/" in line]
    assert len(last) == 2, "a worker stopped early"


def test_closed_standard_streams_do_not_disturb_a_run(launcher: Launcher) -> None:
    command = shlex.join(launcher.arguments("--", "true"))
    done = subprocess.run(
        ["sh", "-c", f"{command} >&- 2>&- <&-"],
        cwd=launcher.cwd,
        env=launcher.env,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert (launcher.cwd / "run" / "report.json").is_file()


def test_more_workers_than_the_soft_limit_of_open_files_allows(launcher: Launcher) -> None:
    command = shlex.join(launcher.arguments("--workers", "16", "--", "true"))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 64; exec {command}"],
        cwd=launcher.cwd,
        env=launcher.env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout


def test_a_foreign_command_is_supervised_without_a_data_step(launcher: Launcher) -> None:
    run = launcher("--", "sh", "-c", "echo $GPU_RANK $MODEL_CHECK_WORKER")
    assert run.exit_code == 0, run.output
    assert run.lines("[CPU1] ") == ["[CPU1] 1 CPU1"]
    assert not (run.directory / "data.json").exists()


def test_a_foreign_command_may_train_something_else_on_every_gpu(scripted: Launcher) -> None:
    whole = load(Request(config_file=scripted.config), lambda: False).settings
    (scripted.cwd / "whole").write_bytes(to_json(whole))
    trainer = f"exec {sys.executable} {ROOT}/tests/scripted/pretrain_main.py --config whole"
    run = scripted("--", "sh", "-c", f"{trainer} system.seed=$GPU_RANK")
    assert run.exit_code == 0, run.output
    assert "not compared" in run.report()["summary"]


def test_a_foreign_command_that_is_silent_too_long_hangs_at_the_limit(launcher: Launcher) -> None:
    run = launcher("--hang-timeout", "1", "--", "sleep", "100")
    assert run.exit_code == 124, run.output
    assert "(limit 1 s)" in run.report()["summary"]
