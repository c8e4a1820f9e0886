"""A signal to every process of a job, whichever gets it first: nobody is blamed, in no report."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.contain import processes
from tests.e2e.conftest import Launcher, Run
from tests.e2e.test_signals import MANY, read_until_both_step
from tests.launcher.supervise.lab import wait_until_dead, wait_until_stopped

DEFAULT = "echo up; exec sleep 1000"
HANDLES = (
    "trap 'exit 143' TERM; trap 'exit 130' INT; trap 'exit 129' HUP; "
    "echo up; while :; do sleep 0.02; done"
)


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    _guardian, *workers = processes.children(process.pid) or [0]
    return workers


def start_command(launcher: Launcher, code: str) -> "subprocess.Popen[str]":
    """Two workers with this shell code, which says `up`."""
    process = launcher.start("--", "sh", "-c", code)
    assert process.stdout is not None
    waiting = 2
    for line in process.stdout:
        waiting -= "] up" in line
        if waiting == 0:
            break
    return process


def signal_all_at_once(
    process: "subprocess.Popen[str]", signum: int, *, launcher_first: bool, us: bool = True
) -> None:
    """The launcher is stopped meanwhile: it sees all deaths, and its own signal, at once."""
    pids = workers_of(process)
    process.send_signal(signal.SIGSTOP)
    wait_until_stopped(process.pid)
    for pid in [*[process.pid] * (us and launcher_first), *pids]:
        os.kill(pid, signum)
    wait_until_dead(pids)
    if us and not launcher_first:
        process.send_signal(signum)
    process.send_signal(signal.SIGCONT)


def assert_report_can_be_rebuilt(launcher: Launcher, run: Run) -> None:
    """From the files alone, with the same result."""
    before = run.report()
    (run.directory / "report.json").unlink()
    rebuilt = subprocess.run(
        [*launcher.arguments()[:3], "report", str(run.directory)],
        env=launcher.env,
        cwd=launcher.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    after: dict[str, Any] = json.loads((run.directory / "report.json").read_text())
    assert after == before
    assert rebuilt.returncode == run.exit_code
    assert f"[launcher] {before['verdict']}: {before['summary']}" in rebuilt.stdout


@pytest.mark.parametrize(
    ("signum", "launcher_first", "code"),
    [
        (signal.SIGTERM, True, DEFAULT),
        (signal.SIGTERM, False, HANDLES),
        (signal.SIGINT, False, DEFAULT),
        (signal.SIGHUP, True, HANDLES),
    ],
)
def test_workers_that_a_job_wide_signal_ended_are_stopped_not_failed(
    launcher: Launcher, signum: signal.Signals, launcher_first: bool, code: str
) -> None:
    process = start_command(launcher, code)
    signal_all_at_once(process, signum, launcher_first=launcher_first)
    run = launcher.finish(process)
    assert run.exit_code == 128 + signum
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "STOPPED"}
    report = run.report()
    assert (report["verdict"], report["culprits"]) == ("INCONCLUSIVE", [])
    assert report["summary"] == f"{signum.name} received"
    assert {worker["cause"] for worker in report["workers"]} == {f"ended by {signum.name}"}
    assert_report_can_be_rebuilt(launcher, run)


def test_the_trainer_that_is_told_to_end_before_its_launcher_is_stopped(
    scripted: Launcher,
) -> None:
    process = scripted.start(MANY)
    seen = read_until_both_step(process)
    signal_all_at_once(process, signal.SIGTERM, launcher_first=False)
    run = scripted.finish(process, seen)
    assert run.exit_code == 143, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "STOPPED"}


def test_the_preparation_that_is_told_to_end_before_its_launcher_is_stopped(
    scripted: Launcher,
) -> None:
    process = scripted.start(MANY, PREPARES_WHEN=str(scripted.cwd / "never"))
    while not workers_of(process):
        os.sched_yield()
    signal_all_at_once(process, signal.SIGTERM, launcher_first=False)
    run = scripted.finish(process)
    assert run.exit_code == 143, run.output
    assert run.verdicts() == {"prepare": "STOPPED"}
    assert run.report()["culprits"] == []


def test_a_notice_that_ends_a_command_without_a_handler_blames_nobody(launcher: Launcher) -> None:
    process = start_command(launcher, DEFAULT)
    process.send_signal(signal.SIGUSR1)
    run = launcher.finish(process)
    assert run.exit_code == 138
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "STOPPED"}
    assert run.report()["culprits"] == []
    assert "SIGUSR1 received, which ended CPU" in run.report()["summary"]


def test_a_tie_names_nobody_and_keeps_the_exit_code_and_the_last_lines(launcher: Launcher) -> None:
    process = start_command(launcher, DEFAULT)
    signal_all_at_once(process, signal.SIGKILL, launcher_first=False, us=False)
    run = launcher.finish(process)
    assert run.exit_code == 137
    assert run.verdicts() == {"CPU0": "INCONCLUSIVE", "CPU1": "INCONCLUSIVE"}
    report = run.report()
    assert (report["verdict"], report["culprits"]) == ("INCONCLUSIVE", [])
    assert report["summary"] == "every worker was killed by SIGKILL (9)"
    assert [worker["last_lines"] for worker in report["workers"]] == [["up"], ["up"]]
    assert "last lines of CPU1:" in run.output
    assert_report_can_be_rebuilt(launcher, run)


def test_one_that_was_killed_alone_by_a_signal_is_blamed(launcher: Launcher) -> None:
    process = start_command(launcher, DEFAULT)
    os.kill(workers_of(process)[0], signal.SIGTERM)
    run = launcher.finish(process)
    assert run.exit_code == 143
    assert run.verdicts() == {"CPU0": "FAIL", "CPU1": "STOPPED"}
    assert run.report()["summary"] == "CPU0 failed first: killed by SIGTERM (15)"


def ignores(pid: int, signum: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_an_ignored_ctrl_c_stays_ignored_by_launcher_and_workers(launcher: Launcher) -> None:
    """A job in the background of a script."""
    shell = ["/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    process = subprocess.Popen(
        [*shell, *launcher.arguments("--", "sh", "-c", DEFAULT)],
        cwd=launcher.cwd,
        env=launcher.env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "] up" in line:
            break
    are_ignoring = [ignores(pid, signal.SIGINT) for pid in (process.pid, *workers_of(process)[:1])]
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).exit_code == 143
    assert are_ignoring == [True, True]
