"""Resuming, ending early and evaluating a whole run: the launcher, its workers, the verdict."""

import json
import os
import signal
from typing import Any

from tests.e2e.conftest import Launcher, Run

MANY = "--max-steps=100000"


def steps_of(run: Run, worker: str) -> list[int]:
    lines = (run.directory / f"{worker}.events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [event["step"] for event in events if event["kind"] == "step"]


def resumed(launcher: Launcher, first: Run, *more: str) -> Run:
    """A second run beside the first's checkpoints."""
    assert first.exit_code == 0, first.output
    first.directory.rename(launcher.cwd / "first")
    return launcher("--resume", "auto", *more)


def test_each_worker_goes_on_from_its_own_checkpoint_and_they_are_compared(
    launcher: Launcher,
) -> None:
    first = launcher("training.save_interval=2", "training.keep_last=1", "--max-steps=4")
    for worker in ("cpu0", "cpu1"):
        kept = sorted(os.listdir(launcher.cwd / ".checkpoints" / worker))
        assert kept == [".in_use", "step_4.pt"]
    second = resumed(launcher, first, "--max-steps=7")
    assert second.exit_code == 0, second.output
    for worker in ("cpu0", "cpu1"):
        assert steps_of(second, worker) == [4, 5, 6]
        told = f"Resumed from .checkpoints/{worker}/step_4.pt: 4 steps done"
        assert f"[{worker.upper()}] {told}" in second.output
    assert "[CPU0] Step [4/7]" in second.output
    assert "trained 3 steps" in second.report()["summary"]
    assert "equal bit for bit in 3 of 3 steps" in second.report()["summary"]


def test_workers_that_resume_at_different_steps_still_agree(launcher: Launcher) -> None:
    first = launcher("training.save_interval=2", "--max-steps=4")
    (launcher.cwd / ".checkpoints" / "cpu1" / "step_4.pt").write_bytes(b"torn")
    second = resumed(launcher, first, "--max-steps=7")
    assert second.exit_code == 0, second.output
    assert "[CPU1] Not resumed: .checkpoints/cpu1/step_4.pt: damaged" in second.output
    assert (steps_of(second, "cpu0"), steps_of(second, "cpu1")) == ([4, 5, 6], [2, 3, 4, 5, 6])
    assert second.report()["verdict"] == "PASS"


def test_a_path_that_does_not_exist_is_refused_before_anything_starts(launcher: Launcher) -> None:
    run = launcher("--resume", "nowhere.pt")
    assert run.exit_code == 2
    assert run.output.splitlines() == [
        "[launcher] error: training.resume = nowhere.pt: no such file or directory (auto: the "
        "newest of system.checkpoint_dir)"
    ]
    assert not run.directory.exists()


def test_a_notice_saves_on_every_worker_and_is_told_with_exit_code_0(launcher: Launcher) -> None:
    process = launcher.start(MANY, "training.save_on_signal=true")
    assert process.stdout is not None
    seen = ""
    waiting = {"[CPU0] Step [1/", "[CPU1] Step [1/"}
    for line in process.stdout:
        seen += line
        waiting = {words for words in waiting if not line.startswith(words)}
        if not waiting:
            break
    process.send_signal(signal.SIGUSR1)
    run = launcher.finish(process, seen)
    assert run.exit_code == 0, run.output
    report = run.report()
    assert report["verdict"] == "INCONCLUSIVE"
    assert set(run.verdicts().values()) == {"STOPPED"}
    assert "ended early by SIGUSR1: " in report["summary"]
    assert "equal bit for bit in" in report["summary"]
    for worker in ("cpu0", "cpu1"):
        assert (launcher.cwd / ".checkpoints" / worker / "last.pt").exists()


def test_a_term_to_the_launcher_saves_nothing_and_is_no_pass(launcher: Launcher) -> None:
    process = launcher.start(MANY, "training.save_on_signal=true")
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith("[CPU1] Step [1/"):
            break
    process.send_signal(signal.SIGTERM)
    run = launcher.finish(process, seen)
    assert run.exit_code == 143, run.output
    assert set(run.verdicts().values()) == {"STOPPED"}
    assert not (launcher.cwd / ".checkpoints").exists()


def test_validation_is_in_the_report_and_on_the_terminal(launcher: Launcher) -> None:
    run = launcher(
        *("data.num_samples=2000", "data.validation=held_out=0.1"),
        *("training.eval_interval=2", "training.eval_batches=2"),
    )
    assert run.exit_code == 0, run.output
    for worker in run.report()["workers"]:
        (result,) = worker["validation"]
        assert (result["split"], result["step"]) == ("held_out", 4)
        assert result["perplexity"] > 1
        assert result["tokens_per_s"] > 0
    assert "[launcher] all 2 CPU workers: validation after 4 steps: held_out " in run.output
    assert run.lines("[CPU1] Eval [2] held_out | Loss: ")
