"""Trees to start in: bare, started once, and ready."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shell.tree import WHEELS, FirstStart, Tree, lay_traps, make_tree, make_wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for name, version in (*WHEELS.items(), ("alpha", "1.5")):
        make_wheel(directory, name, version)
    return directory


@pytest.fixture(scope="session")
def first_start(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> FirstStart:
    """In a working directory whose modules tell when one imports them."""
    tree = make_tree(tmp_path_factory.mktemp("first"), wheels)
    return FirstStart(tree, lay_traps(tree), tree("--debug"))


@pytest.fixture
def bare(tmp_path: Path, wheels: Path) -> Tree:
    """A tree without an environment."""
    return make_tree(tmp_path, wheels)


@pytest.fixture
def ready(bare: Tree, first_start: FirstStart) -> Tree:
    """A tree whose environment was made by an earlier start (elsewhere: venvs can be copied)."""
    copy_environment(first_start.tree, bare)
    return bare


@pytest.fixture(scope="module")
def first_checks(
    tmp_path_factory: pytest.TempPathFactory, wheels: Path, first_start: FirstStart
) -> FirstStart:
    """check.sh in an environment to run in, by the name that CI calls it."""
    tree = make_tree(tmp_path_factory.mktemp("checks"), wheels)
    copy_environment(first_start.tree, tree)
    return FirstStart(tree, lay_traps(tree), tree("-k", "one test", script=".ci/run"))


def copy_environment(source: Tree, target: Tree) -> None:
    shutil.copytree(source.venv, target.venv, symlinks=True, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    """Packages as links: pip replaces files, it does not write into them."""
    (os.link if "/site-packages/" in source else shutil.copy2)(source, target)


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
