"""A worker that is in step with its equals."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher, pid_of
from tests.e2e.test_signals import read_until_both_step
from tests.launcher.supervise.lab import wait_until_stopped

NUM_STEPS = 20


def events(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def wait_until_it_waited(path: Path, after_step: int, num_beats: int = 3) -> None:
    """So many beats, since that step. A worker that waits beats once a second."""
    until = time.monotonic() + DEADLINE_S
    while True:
        seen = events(path)
        steps = [event["step"] for event in seen if event["kind"] == "step"]
        kinds = [event["kind"] for event in seen]
        if steps[-1:] == [after_step] and kinds[-num_beats:] == ["beat"] * num_beats:
            return
        assert time.monotonic() < until, kinds
        time.sleep(0.05)


def test_a_worker_that_stands_still_holds_its_equal_a_few_steps_ahead(scripted: Launcher) -> None:
    steps = (f"--max-steps={NUM_STEPS}", "launch.max_lead=3")
    process = scripted.start(*steps, STOPS_AFTER="CPU1 5")
    seen = read_until_both_step(process)
    slow = pid_of("CPU1", scripted.cwd / "run")
    wait_until_stopped(slow)
    assert b"\0MODEL_CHECK_HELD=1\0" in Path(f"/proc/{slow}/environ").read_bytes()
    wait_until_it_waited(scripted.cwd / "run" / "cpu0.events.jsonl", after_step=5 + 3)
    os.kill(slow, signal.SIGCONT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 0, run.output
    assert f"in {NUM_STEPS} of {NUM_STEPS} steps" in run.report()["summary"]
