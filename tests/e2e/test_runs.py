"""`runs`: directories of real runs, listed, opened and removed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT
from tests.in_process import answer_of

OLD_S = 8 * 86400


class Runs:
    """A directory of run directories, and the command line beside it."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.cwd = parent.parent

    def popen(self, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher", *arguments],
            cwd=self.cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def do(self, *arguments: str, code: int = 0, **env: str) -> str:
        if "open" in arguments:  # Python looks for browsers once in a process
            process = self.popen(*arguments, **env)
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == code, out
            return out
        done = answer_of(*arguments, cwd=self.cwd, env={**os.environ, **env})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def verb(self, *arguments: str, code: int = 0, **env: str) -> str:
        return self.do("runs", *arguments, "--parent", str(self.parent), code=code, **env)

    def run(self, command: str) -> "subprocess.Popen[str]":
        log_dir = f"logging.log_dir={self.parent}"
        return self.popen("--device", "cpu", "--workers", "1", log_dir, "--", "sh", "-c", command)

    def ended(self, command: str) -> Path:
        process = self.run(command)
        out, _ = process.communicate(timeout=DEADLINE_S)
        (line,) = [line for line in out.splitlines() if "run directory" in line]
        return Path(line.rpartition(" ")[2])

    def begun(self) -> "subprocess.Popen[str]":
        process = self.run("echo up; exec sleep 1000")
        assert process.stdout is not None
        assert any("[CPU0] up" in line for line in process.stdout)
        return process

    def listed(self) -> dict[str, Any]:
        rows = json.loads(self.verb("--json"))["runs"]
        return {row["directory"]: row for row in rows}

    def names(self) -> set[str]:
        return {path.name for path in self.parent.iterdir()}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    parent = tmp_path / "logs"
    parent.mkdir()
    return Runs(parent)


@pytest.fixture
def going(runs: Runs) -> Iterator["subprocess.Popen[str]"]:
    process = runs.begun()
    yield process
    process.terminate()
    process.wait(DEADLINE_S)
    assert process.stdout is not None
    process.stdout.close()


def age(directory: Path, seconds: float = OLD_S) -> Path:
    then = time.time() - seconds
    for path in (directory / "launcher.log", directory):
        if path.exists():
            os.utime(path, (then, then))
    return directory


def test_each_run_is_listed_with_its_verdict_newest_last(
    runs: Runs, going: "subprocess.Popen[str]"
) -> None:
    good, bad = age(runs.ended("true")), age(runs.ended("exit 7"), 60)
    head, *rows = runs.verb().splitlines()
    assert head.split() == ["verdict", "exit", "MiB", "directory", "in", str(runs.parent)]
    assert [row.split()[0] for row in rows] == ["PASS", "FAIL", "running"]
    assert [row.split()[1] for row in rows[:2]] == ["0", "7"]
    assert [row.split()[-1] for row in rows[:2]] == [good.name, bad.name]
    assert max(map(len, rows)) <= 80


def test_a_run_whose_launcher_was_killed_is_told_and_its_report_made(runs: Runs) -> None:
    process = runs.begun()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    ((directory, row),) = runs.listed().items()
    assert (row["verdict"], row["exit_code"]) == ("cut short", None)
    assert "no run of yours that has a report" in runs.verb("open", directory, code=2)
    runs.do("report", directory, code=70)
    assert runs.listed()[directory]["exit_code"] == 70


def test_a_report_that_is_made_again_makes_a_run_no_younger(runs: Runs) -> None:
    old, new = age(runs.ended("true")), runs.ended("exit 7")
    runs.do("report", str(old))
    assert f"{new}/report.html" in runs.verb("open", BROWSER="", DISPLAY="", WAYLAND_DISPLAY="")
    assert list(runs.listed()) == [str(old), str(new)]


def test_a_report_that_is_damaged_is_none(runs: Runs) -> None:
    directory = runs.ended("true")
    (directory / "report.json").write_bytes(b'{"verdict": "\xff", "exit_code": 0, "summary": ""}')
    assert runs.listed()[str(directory)]["exit_code"] is None


def test_open_names_the_newest_report_or_the_one_that_is_asked_for(runs: Runs) -> None:
    good, bad = age(runs.ended("true")), runs.ended("exit 7")
    page = "\n".join(("import os, sys", "open('opened', 'a').write(sys.argv[1])"))
    (runs.cwd / "browser.py").write_text(page)
    browser = f"{sys.executable} {runs.cwd / 'browser.py'} %s"
    assert f"{bad}/report.html" in runs.verb("open", BROWSER=browser)
    assert (runs.cwd / "opened").read_text() == (bad / "report.html").as_uri()
    for name in (good.name, str(good), os.path.relpath(good, runs.cwd)):
        out = runs.verb("open", name, BROWSER="", DISPLAY="", WAYLAND_DISPLAY="")
        assert out.splitlines()[0].startswith("PASS: ")
        assert "no browser can be started here" in out


def test_clear_removes_the_old_ones_and_never_one_that_goes_on(
    runs: Runs, going: "subprocess.Popen[str]"
) -> None:
    (running,) = runs.parent.iterdir()
    age(running)
    old, new = age(runs.ended("true")), runs.ended("exit 7")
    assert f"would remove {old}" in runs.verb("clear", "--dry-run")
    assert runs.names() == {running.name, old.name, new.name}
    assert "1 of 3" in runs.verb("clear")
    assert runs.names() == {running.name, new.name}
    assert "1 of 2" in runs.verb("clear", "--days", "0")
    assert runs.names() == {running.name}


def test_clear_leaves_what_is_not_the_users_or_not_known(runs: Runs, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (runs.parent / "model_check_logs_1_link").symlink_to(kept)
    starting = runs.parent / "model_check_logs_2_starting"
    theirs = age(runs.ended("true"))
    nest = runs.parent / "model_check_logs_3_nest"
    for directory in (starting, nest / "a" / "b"):
        directory.mkdir(parents=True)
    (nest / "a" / "out").symlink_to(kept)
    age(nest)
    expected = {"model_check_logs_1_link", starting.name}
    if os.geteuid() == 0:
        os.chown(theirs, 4711, 4711)
        expected.add(theirs.name)
    runs.verb("clear", "--days", "0")
    assert runs.names() == expected
    assert (kept / "file").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("foo",), "'foo': none of list, open, clear (--help"),
        (("opne",), "did you mean open?"),
        (("clear", "--older", "1"), "--older: no such option (--help"),
        (("clear", "--days", "-1"), "invalid days value: '-1'"),
        (("clear", "--dayz", "1"), "--dayz: no such option; did you mean --days?"),
        (("open", "/etc"), "/etc: no run of yours that has a report"),
        (("open",), "no run of yours that has a report"),
    ],
)
def test_what_cannot_be_done_is_told(runs: Runs, arguments: tuple[str, ...], told: str) -> None:
    out = runs.verb(*arguments, code=2)
    assert told in out
    assert "Traceback" not in out
