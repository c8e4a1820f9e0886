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
from tests.e2e.starts import Ended, Start, run_each
from tests.launcher.report.test_rebuild import written

ONE = ("--device", "cpu", "--workers", "1", "--dry-run")


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return env | {"PYTHONPATH": str(ROOT)}


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    """Sparse: it takes no room."""
    path.touch()
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": link_to_zero,
    "huge": huge,
    "directory": Path.mkdir,
}
FILES = {
    "a.json": (*ONE, "--config", "a.json"),
    "a.yaml": (*ONE, "--config", "a.yaml"),
    "config.json": (*ONE, "model.geometry=."),
    "run/run.json": ("report", "run"),
    "ended/cpu0.events.jsonl": ("report", "ended"),
}
CASES = [(kind, name) for kind in KINDS for name in FILES]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """What each start came to that names such a file."""
    starts = {}
    for kind, name in CASES:
        directory = tmp_path_factory.mktemp(kind)
        (directory / "run").mkdir()
        (directory / "ended").mkdir()
        written(directory / "ended")
        KINDS[kind](directory / name)
        starts[f"{kind} {name}"] = Start(directory, FILES[name])
    return run_each(starts, environment())


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_has_no_end_is_refused_by_its_name(
    ended: dict[str, Ended], kind: str, name: str
) -> None:
    code, shown = ended[f"{kind} {name}"]
    assert code == 2, shown
    (line,) = shown.splitlines()
    assert line.startswith("[launcher] error: ")
    assert name in line


def test_settings_through_a_pipe_of_the_shell_are_read(tmp_path: Path) -> None:
    line = f"""{sys.executable} -P -m launcher config show --config <(echo '{{"system": """
    line += """{"device": "cpu", "seed": 4711}}')"""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    assert "4711" in done.stdout
