"""What must be installed, and which of it is. Reads pyproject.toml and constraints.txt, imports
none of the packages. Standard library only: it runs where nothing is installed yet.

`python -m launcher.install.requirements > requirements.txt` makes that file; with NAME ... it
prints `NAME==VERSION` of each of these that `inherited` finds and that will do.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from model_check.errors import InternalError
from model_check.utils.project_files import PROJECT
from model_check.utils.words import printable_lines

PYPROJECT = PROJECT / "pyproject.toml"
CONSTRAINTS = PROJECT / "constraints.txt"
RUN_EXTRAS = ("hub",)
"""Extras that every environment to run in gets."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:>=\s*([0-9]+(?:\.[0-9]+)*))?")
_RELEASE = re.compile(r"(?:[0-9]+!)?([0-9]+(?:\.[0-9]+)*)")


class Requirement(NamedTuple):
    """A distribution and the oldest version of it that will do; an empty `minimum`: any."""

    name: str
    minimum: str = ""

    def __str__(self) -> str:
        return f"{self.name}>={self.minimum}" if self.minimum else self.name

    def met_by(self, version: str | None) -> bool:
        """Whether that installed version will do (None: there is none)."""
        return version is not None and _release(version) >= _release(self.minimum)


def required() -> list[Requirement]:
    """The dependencies of pyproject.toml."""
    return [_parse(line) for line in _project()["dependencies"]]


def extra(name: str) -> list[Requirement]:
    """What the extra of that name adds to them."""
    return [_parse(line) for line in _project()["optional-dependencies"][name]]


def to_run() -> list[Requirement]:
    """What run.sh installs."""
    return [*required(), *(need for name in RUN_EXTRAS for need in extra(name))]


def requirements_file() -> str:
    """requirements.txt, for a pip of one's own: what run.sh installs, at the versions it takes."""
    head = (
        "# Made from pyproject.toml: python -m launcher.install.requirements > requirements.txt\n"
    )
    return f"{head}-c {CONSTRAINTS.name}\n" + "".join(f"{need}\n" for need in to_run())


def pins() -> dict[str, str]:
    """constraints.txt: normalised name -> version."""
    lines = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {normalised(name): version for name, version in pairs}


def installed(name: str) -> str | None:
    """The version that this interpreter would import; None: not installed, or only half."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)  # None: its metadata is damaged
    return None


def lacking(requirements: Iterable[Requirement]) -> list[Requirement]:
    """Those that this interpreter does not meet."""
    return [need for need in requirements if not need.met_by(installed(need.name))]


def inherited(name: str) -> str | None:
    """The version of `name` that lies outside this interpreter's own environment; None: none."""
    for found in importlib.metadata.distributions(name=name):
        inside = Path(str(found.locate_file(""))).is_relative_to(sys.prefix)
        return None if inside else found.version
    return None


def say(text: str) -> None:
    """A line for a person. On stderr: stdout may be read by a program."""
    print(f"[launcher] {printable_lines(text)}", file=sys.stderr, flush=True)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["project"]
    return project


def _parse(line: str) -> Requirement:
    match = _REQUIREMENT.fullmatch(line.strip())
    if match is None:
        raise InternalError(f"{PYPROJECT}: {line!r}: only `name` and `name>=1.2` are understood")
    return Requirement(match[1], match[2] or "")


def _release(version: str) -> tuple[int, ...]:
    """`2.11.0a0+nv25.12` -> (2, 11): containers of GPU vendors carry builds of an unreleased
    torch under such names, and those will do."""
    match = _RELEASE.match(version)
    numbers = [int(part) for part in match[1].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


if __name__ == "__main__":
    if not sys.argv[1:]:
        print(requirements_file(), end="")
    for need in required():
        if need.name in sys.argv[1:] and need.met_by(version := inherited(need.name)):
            print(f"{need.name}=={version}")
