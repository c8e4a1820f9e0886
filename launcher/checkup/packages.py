"""The interpreter and what is installed for it. Imports none of it: torch alone takes seconds."""

import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

from launcher.checkup.finding import Finding, fail, ok, warn
from launcher.gpus.probe import Snapshot
from launcher.requirements import Requirement, installed, pins, required

OPTIONAL = ("hub", "flash")
"""Extras whose absence only closes a door."""

_ASSIGNMENT = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*'([^']*)'", re.MULTILINE)


class TorchBuild(NamedTuple):
    """What torch was built for; None: not for that."""

    version: str
    cuda: str | None
    hip: str | None


def check_packages(snapshot: Snapshot | None) -> list[Finding]:
    """`snapshot`: the GPUs; None when they could not be asked."""
    findings = [_python()]
    findings += [_required(wanted) for wanted in required()]
    findings += [_optional(wanted, extra) for extra in OPTIONAL for wanted in required([extra])[_n():]]
    build = torch_build()
    if build is not None:
        findings.append(_torch(build, snapshot))
    return findings
