"""A lab to run workers in, and supervisors that are processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from launcher.verdict.record import Stop
from tests.launcher.supervise.lab import ROOT, Lab, Launch, Observe, OwnProcess, is_alive, open_fds


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    before = open_fds()
    lab = Lab(tmp_path)
    yield lab
    left = [pid for pid in lab.pids().values() if is_alive(pid)]
    for pid in left:
        os.kill(pid, 9)
    assert not left, "a test left processes behind"
    assert open_fds() <= before, "a descriptor was leaked"


@pytest.fixture
def launch(lab: Lab) -> Iterator[Launch]:
    """Start a supervisor as a process; `prefix` goes before its command line (`nohup`, `sh -c`);
    `then`: the workers of a second run in the same process. `is_job`: in a process group of its own
    in our session, as a shell with job control starts it, not in a session of its own. `in_step`:
    the workers are one group. `constants`: `MODULE.NAME` of launcher.supervise -> another value."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        *commands: Sequence[str],
        grace_s: float = 30.0,
        silence_s: float = 0.0,
        prefix: Sequence[str] = (),
        stdout: int = subprocess.PIPE,
        then: Sequence[Sequence[str]] = (),
        is_job: bool = False,
        in_step: bool = False,
        constants: Mapping[str, float] | None = None,
    ) -> OwnProcess:
        limits = {"grace_s": grace_s, "silence_s": silence_s}
        plan = {"dir": str(lab.dir), "limits": limits, "commands": commands, "then": then}
        plan |= {"in_step": in_step, "constants": dict(constants or {})}
        driver = (sys.executable, str(Path(__file__).with_name("driver.py")), json.dumps(plan))
        process = subprocess.Popen(
            (*prefix, *driver),
            stdout=stdout,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LAB": str(lab.dir)},
            start_new_session=not is_job,
            process_group=0 if is_job else None,
        )
        started.append(process)
        return OwnProcess(lab, process)

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def stop_on_first_event() -> Observe:
    return lambda worker, event: Stop(f"{worker} said {type(event).__name__}", 21, (worker,))
