"""What README tells people to type, typed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, TINY

README = (ROOT / "README.md").read_text()
_, _, TABLE = README.partition("### From another trainer")
COMMANDS = [
    command
    for row in TABLE.partition("[config/README.md]")[0].splitlines()
    if row.startswith("| `") or row.startswith("| its")
    for command in re.findall(r"`bash run\.sh ([^`]*)`", row.rpartition(" | ")[2])
]


def ours(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all that the commands of the table name."""
    path = tmp_path_factory.mktemp("from_another_trainer")
    (path / "my.yaml").write_text("training: {max_steps: 20}\n")
    (path / "texts").mkdir()
    (path / "texts" / "a.txt").write_text("some words of a text " * 500)
    (path / "tiny.json").write_text(json.dumps(TINY))
    where = f"logging.log_dir={path}"
    trained = ours(path, "--config", "tiny.json", "training.save_last=true", where)
    assert trained.returncode == 0, trained.stdout
    (path / ".checkpoints" / "cpu0" / "last.pt").rename(path / "last.pt")
    size = ("--tokenizer_type", "bpe", "--vocab_size", "512", "--max_length", "32")
    prepared = ours(path, "prepare", "--input_dir", "texts", "--output_dir", "prepared", *size)
    assert prepared.returncode == 0, prepared.stderr
    return path


def test_the_table_is_found() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_for_people_from_another_trainer_are_understood(
    cwd: Path, command: str
) -> None:
    match shlex.split(command):
        case ["prepare"]:
            return  # the fixture has typed it
        case [*_, "--gpu" | "--gpus", _] as arguments:
            done = ours(cwd, *arguments[:-2], "--device", "cpu", "--dry-run")
        case arguments:
            done = ours(cwd, *arguments, "--device", "cpu", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "pretrain_main.py" in done.stdout
