"""The real trainer, in step with its equals."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.e2e.conftest import DEADLINE_S, Launcher
from tests.e2e.test_signals import read_until_both_step

NUM_STEPS = 1000


def events(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def last_step(path: Path) -> int:
    return max(event["step"] for event in events(path) if event["kind"] == "step")


def pid_of(worker: str, directory: Path) -> int:
    """Of the process that trains as this worker of the run in a directory."""
    tags = {f"MODEL_CHECK_WORKER={worker}".encode(), f"MODEL_CHECK_RUN_DIR={directory}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if tags <= {*(process / "environ").read_bytes().split(b"\0")}:
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"{worker} does not run")


def test_a_worker_that_stands_still_holds_its_equal_a_few_steps_ahead(launcher: Launcher) -> None:
    process = launcher.start(f"--max-steps={NUM_STEPS}", "launch.max_lead=3")
    seen = read_until_both_step(process)
    slow, (ahead, behind) = (
        pid_of("CPU1", launcher.cwd / "run"),
        (launcher.cwd / "run" / f"cpu{n}.events.jsonl" for n in (0, 1)),
    )
    os.kill(slow, signal.SIGSTOP)
    until = time.monotonic() + DEADLINE_S
    while not {"beat", "done"} & {event["kind"] for event in events(ahead)}:
        assert time.monotonic() < until
        time.sleep(0.05)
    lead = last_step(ahead) - last_step(behind)
    os.kill(slow, signal.SIGCONT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 0, run.output
    assert lead == 3
    assert f"in {NUM_STEPS} of {NUM_STEPS} steps" in run.report()["summary"]


def test_a_worker_without_equals_waits_for_nobody(launcher: Launcher) -> None:
    run = launcher("--workers=1")
    assert run.exit_code == 0, run.output
    kinds = [event["kind"] for event in events(run.directory / "cpu0.events.jsonl")]
    assert "beat" not in kinds
    assert kinds.index("finished") < kinds.index("done")
