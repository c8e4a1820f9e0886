"""A file that a person or another user names and that never ends, or never begins: a pipe, a link
to a device. Each is refused by its name, with exit code 2; nothing blocks."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT
from tests.launcher.report.test_rebuild import written

ONE = ("--device", "cpu", "--workers", "1", "--dry-run")


def start(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return subprocess.run(
        command,
        cwd=cwd,
        env=env | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )


def launcher(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return start(cwd, sys.executable, "-P", "-m", "launcher", *arguments)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    """Sparse: it takes no room."""
    path.touch()
    os.truncate(path, 1 << 40)


KINDS = {"pipe": os.mkfifo, "device": link_to_zero, "huge": huge, "directory": Path.mkdir}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("a.json", (*ONE, "--config", "a.json")),
        ("a.yaml", (*ONE, "--config", "a.yaml")),
        ("config.json", (*ONE, "model.geometry=.")),
        ("run/run.json", ("report", "run")),
        ("ended/cpu0.events.jsonl", ("report", "ended")),
    ],
    ids=["settings", "YAML", "geometry", "run", "events"],
)
def test_what_has_no_end_is_refused_by_its_name(
    tmp_path: Path, kind: str, name: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "ended").mkdir()
    written(tmp_path / "ended")
    make: Callable[[Path], object] = KINDS[kind]
    make(tmp_path / name)
    done = launcher(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout
    (line,) = done.stdout.splitlines()
    assert line.startswith("[launcher] error: ")
    assert name in line


def test_settings_through_a_pipe_of_the_shell_are_read(tmp_path: Path) -> None:
    line = f"""{sys.executable} -P -m launcher config show --config <(echo '{{"system": """
    line += """{"device": "cpu", "seed": 4711}}')"""
    done = start(tmp_path, "bash", "-c", line)
    assert done.returncode == 0, done.stdout
    assert "4711" in done.stdout
