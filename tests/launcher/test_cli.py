"""What is printed to a full disk, to nobody, or in an encoding that lacks its characters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERBS = [
    ("config", "show", "--device", "cpu"),
    ("--dry-run", "--device", "cpu"),
    ("doctor", "--device", "cpu"),
    ("report", "--help"),
]


def start(
    cwd: Path, *arguments: str | bytes, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=110,
        check=False,
    )


def nobody() -> int:
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_a_full_disk_is_told_in_a_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = start(tmp_path, *arguments, stdout=full)
    os.close(full)
    assert done.returncode == 2
    assert done.stderr == b"[launcher] error: standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_a_reader_who_is_gone_ends_it_as_sigpipe_would(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    pipe = nobody()
    done = start(tmp_path, *arguments, stdout=pipe)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path) -> None:
    pipe = nobody()
    command = [sys.executable, "-m", "launcher", "--no-such-option"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for stream in (pipe, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(command, cwd=tmp_path, env=env, stderr=stream, timeout=110)
        os.close(stream)
        assert done.returncode == 2


def test_a_command_of_any_bytes_runs_and_is_kept_readably(tmp_path: Path) -> None:
    done = start(tmp_path, "--device", "cpu", "--run-dir", b"r\xff", "--", "printf", b"%s", b"\xfe")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = tmp_path / os.fsdecode(b"r\xff")
    assert (directory / "cpu0.log").read_bytes() == b"\xfe"
    for name in ("run.json", "report.json"):
        document = json.loads((directory / name).read_bytes())
        assert document.get("run", document)["command"][-1] == "\\udcfe"
    assert b"\\udcfe" in (directory / "report.html").read_bytes()
    again = start(tmp_path, "report", b"r\xff")
    assert again.returncode == 0, again.stderr


def test_what_the_terminals_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    assert start(tmp_path, "--device", "cpu", "--run-dir", "run", "--", "true").returncode == 0
    done = start(tmp_path, "report", "run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"\\u2500" in done.stdout


def test_a_report_that_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    start(tmp_path, "--device", "cpu", "--run-dir", "run", "--", "sh", "-c", "exit 7")
    (tmp_path / "run" / "report.json").unlink()
    (tmp_path / "run" / "report.json").mkdir()
    done = start(tmp_path, "report", "run")
    assert done.returncode == 7, done.stderr
    assert b"[launcher] no report: run/report.json: cannot write" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(b"(exit code 7)")
