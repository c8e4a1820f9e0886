"""The interpreter and what is installed for it. Imports none of it: torch alone takes seconds."""

import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

from launcher.doctor.finding import Finding, fail, ok, warn
from launcher.gpus.probe import Snapshot
from launcher.install.requirements import Requirement, extra, installed, normalised, pins, required

OPTIONAL = ("hub", "flash")
"""Extras whose absence only closes a door."""

_ASSIGNMENT = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*'([^']*)'", re.MULTILINE)


class TorchBuild(NamedTuple):
    """What the installed torch was built for; None: not for that."""

    version: str
    cuda: str | None
    hip: str | None


def check_packages(snapshot: Snapshot | None) -> list[Finding]:
    """`snapshot`: the GPUs; None when they could not be asked."""
    findings = [_python(), *map(_required, required())]
    findings += [_optional(wanted, name) for name in OPTIONAL for wanted in extra(name)]
    build = torch_build()
    if build is not None:
        findings.append(check_torch(build, snapshot))
    return findings


def torch_build() -> TorchBuild | None:
    """Read from the file in which torch says so; None: no torch, or one without that file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    values = dict(_ASSIGNMENT.findall(text))
    return TorchBuild(values.get("__version__", "?"), values.get("cuda"), values.get("hip"))


def check_torch(build: TorchBuild, snapshot: Snapshot | None) -> Finding:
    """Can this torch use these GPUs?"""
    found = f"for CUDA {build.cuda}" if build.cuda else f"for ROCm {build.hip}" if build.hip else ""
    if snapshot is None or not snapshot.gpus:
        return ok("torch build", found or "for the CPU only")
    if build.cuda is None:
        return fail(
            "torch build",
            f"{found or 'for the CPU only'}, and there are NVIDIA GPUs",
            f"install a CUDA build of torch for {sys.executable}",
        )
    driver = snapshot.cuda_driver_version
    # A driver serves every CUDA of its own major version and of all before it.
    if driver is not None and _major(build.cuda) > _major(driver):
        return fail(
            "torch build",
            f"{found}, and the driver serves CUDA {driver} at most",
            "update the driver, or install a torch for its CUDA",
        )
    return ok("torch build", f"{found}; the driver serves CUDA {driver or 'N/A'}")


def _python() -> Finding:
    return ok("python", f"{platform.python_version()} {sys.executable}")


def _required(wanted: Requirement) -> Finding:
    version = installed(wanted.name)
    if wanted.met_by(version):
        return ok(wanted.name, f"{version}")
    found = f"{version or 'absent'}, needs {wanted}"
    return fail(wanted.name, found, _install(wanted))


def _optional(wanted: Requirement, name: str) -> Finding:
    version = installed(wanted.name)
    if version is None:
        return ok(wanted.name, f"absent (optional, extra '{name}'; {_install(wanted)})")
    if not wanted.met_by(version):
        return warn(wanted.name, f"{version}, needs {wanted}", _install(wanted))
    return ok(wanted.name, version)


def _install(wanted: Requirement) -> str:
    pin = pins().get(normalised(wanted.name))
    what = f"{wanted.name}=={pin}" if pin else str(wanted)
    return f"{sys.executable} -m pip install '{what}'"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
