"""Cgroups for tests, below the one that the tests run in; version 1 or 2."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
        yield ("/bin/sh", "-c", f'echo $$ > {directory}/cgroup.procs; exec "$@"', "sh")
    finally:
        directory.rmdir()  # EBUSY: somebody is left in it


def _own(controller: str) -> Path:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for number, names, path in lines:
        if controller in names.split(","):
            return _ROOT / controller / path.lstrip("/")
        if number == "0" and not names and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / path.lstrip("/")
    return _ROOT / controller
