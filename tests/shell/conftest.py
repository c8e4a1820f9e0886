"""Trees to start in: bare, started once, and ready."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shell.tree import (
    BASE_PYTHON,
    WHEELS,
    FirstStart,
    Tree,
    copy_environment,
    lay_traps,
    make_tree,
    make_wheel,
)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for name, version in (*WHEELS.items(), ("alpha", "1.5")):
        make_wheel(directory, name, version)
    return directory


@pytest.fixture(scope="session")
def no_ensurepip(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment for a start whose Python has no ensurepip, as Debian's: its own pip installs.
    ensurepip takes 4 s; test_installation.py shows it once."""
    if subprocess.run([BASE_PYTHON, "-c", "import pip"], stderr=subprocess.DEVNULL).returncode:
        return {}
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "ensurepip.py").write_text("raise ImportError")
    return {"PYTHONPATH": str(hidden)}


@pytest.fixture(scope="session")
def first_start(
    tmp_path_factory: pytest.TempPathFactory, wheels: Path, no_ensurepip: dict[str, str]
) -> FirstStart:
    tree = make_tree(tmp_path_factory.mktemp("first"), wheels)
    return FirstStart(tree, lay_traps(tree), tree("--debug", **no_ensurepip))


@pytest.fixture
def bare(tmp_path: Path, wheels: Path) -> Tree:
    """A tree without an environment."""
    return make_tree(tmp_path, wheels)


@pytest.fixture
def ready(bare: Tree, first_start: FirstStart) -> Tree:
    """A tree whose environment was made by an earlier start (elsewhere: venvs can be copied)."""
    copy_environment(first_start.tree, bare)
    return bare


@pytest.fixture
def ready_elsewhere(first_start: FirstStart) -> Path:
    """An environment with all requirements that is not the one of the tree under test."""
    return first_start.tree.venv


@pytest.fixture
def recorder(tmp_path: Path) -> Callable[[Path], Path]:
    """Put a script before a Python that records its starts: `recorder(python)` -> the record."""

    def put(python: Path) -> Path:
        record = tmp_path / "calls"
        target = python.resolve()
        python.unlink()
        python.write_text(f'#!/bin/bash\necho "$*" >>"{record}"\nexec "{target}" "$@"\n')
        python.chmod(0o755)
        return record

    return put
