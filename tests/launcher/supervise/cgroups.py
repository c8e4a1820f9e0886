"""Cgroups for tests, below the one that the tests run in; version 1 or 2."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.contain import cgroup
from launcher.contain.cgroup import Cgroup

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited(controller: str, limits: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """What goes before a command line so that it runs in a new cgroup with these limits (file ->
    value; those that do not exist here are left out). Skips the test where that is not allowed."""
    directory = _own(controller) / f"model_check_test_{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no {controller} cgroup can be made: {error}")
    try:
        found = [name for name in limits if (directory / name).exists()]
        if not found:
            pytest.skip(f"the {controller} controller is not delegated to {directory.parent}")
        for name in found:
            (directory / name).write_text(limits[name])
        yield inside(directory)
    finally:
        directory.rmdir()  # EBUSY: somebody is left in it


@contextmanager
def new_cgroup() -> Iterator[Cgroup]:
    """A cgroup of version 2, cleared at the end. Skips the test where none can be made."""
    if (made := cgroup.make()) is None:
        pytest.skip("no cgroup of version 2 can be made here (needs root or delegation)")
    try:
        yield made
    finally:
        cgroup.clear(made.directory)
        made.close()


@contextmanager
def threaded(directory: str) -> Iterator[None]:
    """Make it a threaded domain: processes may be in it, and cannot enter a new one below it."""
    child = Path(directory, "threads")
    child.mkdir()
    (child / "cgroup.type").write_text("threaded")
    yield
    child.rmdir()


def inside(directory: str | Path) -> tuple[str, ...]:
    """What goes before a command line so that it runs in this cgroup."""
    return ("/bin/sh", "-c", f'echo $$ > {directory}/cgroup.procs; exec "$@"', "sh")


def cgroups_of(pid: int) -> list[Path]:
    """The directory of its cgroup of version 2, if the cgroup is a run's."""
    lines = (Path("/proc") / str(pid) / "cgroup").read_text().splitlines()
    names = [line[3:] for line in lines if line.startswith("0::") and "/model_check_" in line]
    places = [Path(mount + name) for mount in cgroup.MOUNTS for name in names]
    return [place for place in places if (place / "cgroup.kill").exists()]


def _own(controller: str) -> Path:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for number, names, path in lines:
        if controller in names.split(","):
            return _ROOT / controller / path.lstrip("/")
        if number == "0" and not names and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / path.lstrip("/")
    return _ROOT / controller
