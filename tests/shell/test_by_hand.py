"""`python3 pretrain_main.py` in a Python without our packages: it becomes one that has them."""

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import DEADLINE_S
from tests.shell.tree import BASE_PYTHON, LAUNCHER, ROOT, Tree

PROGRAMS = ("pretrain_main.py", "prepare_dataset.py")
OLDEST_READER = (3, 8)
"""The document that people come from names this Python."""


def by_hand(tree: Tree, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """The first lines of the real program, then the stub of the tests for a start."""
    write_program(tree)
    return tree(*arguments, script="pretrain_main.py", shell=str(BASE_PYTHON), **env)


def write_program(tree: Tree) -> None:
    head, found, _ = (ROOT / "pretrain_main.py").read_text().partition("import faulthandler\n")
    assert found
    (tree.root / "pretrain_main.py").write_text(head + LAUNCHER)


def seen(tree: Tree, *arguments: str, **env: str) -> dict[str, Any]:
    done = by_hand(tree, *arguments, **env)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_plain_python_runs_the_program_in_an_environment_that_has_all(
    program: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [BASE_PYTHON, ROOT / program, "--version"],
        env={
            **os.environ,
            "MODEL_CHECK_PYTHON": sys.executable,
            "MODEL_CHECK_VENV": str(tmp_path / "none"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model-check ")


def test_arguments_directory_and_environment_stay(ready: Tree) -> None:
    given = ["a b", "*", "q\"uo'te", "$HOME", "", "--x=1", "back\\slash", "é\n"]
    told = seen(ready, *given, PYTHONPATH="/somewhere::")
    assert told["argv"] == given
    assert told["cwd"] == str(ready.cwd)
    assert told["prefix"] == str(ready.venv)
    assert told["path"] == "/somewhere::"


def test_an_environment_of_another_name_is_found(bare: Tree, ready_elsewhere: Path) -> None:
    assert seen(bare, MODEL_CHECK_VENV=str(ready_elsewhere))["prefix"] == str(ready_elsewhere)
    assert seen(bare, VIRTUAL_ENV=str(ready_elsewhere))["prefix"] == str(ready_elsewhere)
    assert not bare.venv.exists()


def test_options_of_the_interpreter_stay(ready: Tree) -> None:
    """`python3 -m cProfile pretrain_main.py` profiles the program and not its first line."""
    write_program(ready)
    options = ("-m", "cProfile", "-o", "profile.out", "../a b/pretrain_main.py")
    command = [BASE_PYTHON, *options, "exit", "0"]
    done = subprocess.run(command, cwd=ready.cwd, env=ready.env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (ready.cwd / "profile.out").exists()


def test_the_exit_code_and_the_signals_are_the_programs(ready: Tree) -> None:
    assert by_hand(ready, "exit", "7").returncode == 7
    process = ready.popen("pause", script="pretrain_main.py", shell=str(BASE_PYTHON))
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    os.kill(process.pid, signal.SIGUSR1)  # blocked since its first line: no notice kills it
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("chosen", [{}, {"VIRTUAL_ENV": "/nowhere"}])
def test_without_an_environment_one_line_says_what_to_do(
    bare: Tree, chosen: dict[str, str]
) -> None:
    done = by_hand(bare, "--debug", **chosen)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"{bare.venv} is not ready: `bash {bare.root}/run.sh doctor` makes it" in line
    assert not bare.venv.exists()


def test_an_environment_that_is_not_what_it_says_ends_the_search(
    ready: Tree, recorder: Callable[[Path], Path]
) -> None:
    """Its Python is another one, without our packages: once more would be once more for ever."""
    python = ready.venv / "bin" / "python"
    calls = recorder(python)
    stamp = ready.venv / "ready-run"
    stamp.write_text(f"{stamp.read_text().splitlines()[0]}\n{python}\n")
    done = by_hand(ready, "--debug")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "lacks some of our packages" in line
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize("name", [*PROGRAMS, "launcher/install/by_hand.py"])
def test_an_old_python_can_read_what_sends_it_away(name: str) -> None:
    ast.parse((ROOT / name).read_text(), name, feature_version=OLDEST_READER)
