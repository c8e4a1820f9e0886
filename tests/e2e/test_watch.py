"""`watch`: a run as a table, on a real terminal; it leaves the run alone."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher
from tests.e2e.test_run import read_until
from tests.terminal import Terminal


def watch(launcher: Launcher, *argv: str, columns: int = 80) -> Terminal:
    command = [sys.executable, "-m", launcher.module, "watch", *argv]
    return Terminal(command, launcher.cwd, launcher.env, columns=columns)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_run_is_watched_while_it_goes_and_left_alone(
    scripted: Launcher, terminals: list[Terminal]
) -> None:
    run = scripted.start("--max-steps", "100000", RESTS="0.05")
    seen = read_until(run, "[CPU1] Step [1/")
    terminals.append(watch(scripted))
    terminals[0].until(lambda: bool(terminals[0].row("CPU1")))
    assert "q: leave" in terminals[0].screen.lines
    terminals[0].type("q")
    assert "equal, " in terminals[0].rest()
    assert terminals[0].process.wait(DEADLINE_S) == 0
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert scripted.finish(run, seen).exit_code == 130


def test_its_end_ends_the_watching_with_the_verdict(
    scripted: Launcher, terminals: list[Terminal]
) -> None:
    run = scripted.start("--max-steps", "100000", RESTS="0.05")
    seen = read_until(run, "[CPU1] Step [1/")
    terminals.append(watch(scripted, columns=200))
    terminals[0].until(lambda: "norm" in terminals[0].seen)  # where there is room
    run.send_signal(signal.SIGINT)
    scripted.finish(run, seen)
    assert "SIGINT received (exit code 130)" in terminals[0].rest()
    assert terminals[0].process.wait(DEADLINE_S) == 0


def test_runs_that_are_over_are_printed_once_and_what_they_said_moves_no_cursor(
    scripted: Launcher,
) -> None:
    script = r"print('\x1b[2Jgone [red]x[/red] \x07')"
    place = scripted.cwd / "mine"
    scripted("--run-dir", str(place), "--", sys.executable, "-c", script)
    scripted("--max-steps", "2")
    told = scripted.verb("watch", str(place), "run")
    assert told.returncode == 0, told.stdout
    assert "PASS" in told.stdout
    assert "\x1b" not in told.stdout
    assert str(place) in told.stdout
    assert re.search(r"CPU1 .* done$", told.stdout, re.MULTILINE)


def test_a_nan_and_the_one_that_was_stopped_are_told_apart(scripted: Launcher) -> None:
    scripted("--max-steps=100", "debug.drill=nan@1:CPU1")  # or the other one is done by then
    told = scripted.verb("watch", "run").stdout
    assert "DRILL nan@1:CPU1" in told
    assert re.search(r"^CPU0 .* stopped$", told, re.MULTILINE)
    assert re.search(r"^CPU1 .* not finite at step 1$", told, re.MULTILINE)
    assert "FAIL: CPU1 failed first" in told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "watch: no run was started from here"),
        (["nowhere"], "nowhere/run.json: not a run directory"),
        (["--all"], "--all: no such option"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    scripted: Launcher, argv: list[str], message: str
) -> None:
    told = scripted.verb("watch", *argv)
    assert told.returncode == 2
    (line,) = told.stdout.splitlines()
    assert message in line


def test_a_launcher_that_was_killed_is_told_to_be_gone(scripted: Launcher) -> None:
    run = scripted.start("--max-steps", "100000", RESTS="0.05")
    read_until(run, "[CPU1] Step [1/")
    run.kill()
    scripted.finish(run)
    told = scripted.verb("watch", "run")
    assert told.returncode == 0
    assert "its launcher did not live to see the end" in told.stdout


def test_a_report_that_is_no_report_is_passed_over(scripted: Launcher, tmp_path: Path) -> None:
    scripted("--max-steps", "2")
    (tmp_path / "run" / "report.json").write_text(json.dumps(["nonsense"]))
    told = scripted.verb("watch", "run")
    assert told.returncode == 0, told.stdout
    assert "CPU0" in told.stdout
