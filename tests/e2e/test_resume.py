"""Ending early and going on: the launcher, its workers, the verdict."""

import json
import signal
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Launcher, Run
from tests.e2e.test_run import read_until
from tests.e2e.test_signals import MANY, read_until_both_step


def steps_of(run: Run, worker: str) -> list[int]:
    lines = (run.directory / f"{worker}.events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [event["step"] for event in events if event["kind"] == "step"]


def test_a_training_that_a_notice_ends_goes_on_and_ctrl_c_tells_how_once_more(
    launcher: Launcher,
) -> None:
    process = launcher.start(MANY, "--workers=1", "training.save_on_signal=true")
    seen = read_until(process, "Step [1/")
    process.send_signal(signal.SIGUSR1)
    first = launcher.finish(process, seen)
    assert first.exit_code == 0, first.output
    assert (first.report()["verdict"], first.verdicts()) == ("INCONCLUSIVE", {"CPU0": "STOPPED"})
    assert "ended early by SIGUSR1: " in first.report()["summary"]
    num_done = len(steps_of(first, "cpu0"))
    first.directory.rename(launcher.cwd / "first")

    asked = (MANY, "--resume", "auto", "--workers=1", "training.save_interval=1")
    process = launcher.start(*asked)
    seen = read_until(process, f"Step [{num_done + 3}/")
    process.send_signal(signal.SIGINT)
    second = launcher.finish(process, seen)
    assert second.exit_code == 130, second.output
    assert "Traceback" not in second.output
    assert steps_of(second, "cpu0")[0] == num_done
    told = f"[CPU0] Resumed from .checkpoints/cpu0/last.pt: {num_done} steps done"
    assert second.lines(told)
    (line,) = [line for line in second.lines("[launcher] ") if "--resume auto" in line]
    assert line.startswith("[launcher] checkpoint: .checkpoints/cpu0/step_")


def test_each_worker_goes_on_from_its_own_checkpoint_and_they_are_compared(
    scripted: Launcher,
) -> None:
    first = scripted("training.save_interval=2", "--max-steps=4")
    assert first.exit_code == 0, first.output
    first.directory.rename(scripted.cwd / "first")
    (scripted.cwd / ".checkpoints" / "cpu1" / "step_4.pt").unlink()
    second = scripted("--resume", "auto", "--max-steps=7")
    assert second.exit_code == 0, second.output
    assert (steps_of(second, "cpu0"), steps_of(second, "cpu1")) == ([4, 5, 6], [2, 3, 4, 5, 6])
    assert second.report()["verdict"] == "PASS"
    assert "equal bit for bit in 3 of " in second.report()["summary"]


def test_a_path_that_does_not_exist_is_refused_before_anything_starts(launcher: Launcher) -> None:
    run = launcher("--resume", "nowhere.pt")
    assert run.exit_code == 2
    assert run.output.splitlines() == [
        "[launcher] error: training.resume = nowhere.pt: no such file or directory (auto: the "
        "newest of system.checkpoint_dir)"
    ]
    assert not run.directory.exists()


def test_a_term_to_the_launcher_saves_nothing_and_is_no_pass(scripted: Launcher) -> None:
    process = scripted.start(MANY, "training.save_on_signal=true")
    seen = read_until_both_step(process)
    process.send_signal(signal.SIGTERM)
    run = scripted.finish(process, seen)
    assert run.exit_code == 143, run.output
    assert set(run.verdicts().values()) == {"STOPPED"}
    assert not Path(scripted.cwd, ".checkpoints").exists()
