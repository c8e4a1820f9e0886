"""The interpreter and the packages that it has. Imports none of them: torch takes seconds."""

import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.doctor.finding import Finding, fail, ok, told, warn
from launcher.gpus.probe import Snapshot
from launcher.install.requirements import Requirement, extra, installed, normalised, pins, required
from model_check.errors import NoGpuError

OPTIONAL = ("hub", "flash")
"""Extras that a run can do without."""

_UPDATE = "update the driver, or install a torch for its CUDA"
_ASSIGNMENT = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*'([^']*)'", re.MULTILINE)


class TorchBuild(NamedTuple):
    """What the installed torch was built for; `cuda` or `hip` is None: not for that."""

    version: str
    cuda: str | None
    hip: str | None


def check_packages(snapshot: Snapshot | None) -> Iterator[Finding]:
    """`snapshot`: the GPUs; None when they could not be asked."""
    yield ok("python", f"{platform.python_version()} {sys.executable}")
    yield from map(_check_package, required())
    yield from (_check_package(need, name) for name in OPTIONAL for need in extra(name))
    build = torch_build()
    if build is not None:
        yield check_torch(build, snapshot)


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
    if (why := why_too_old(build, driver)) is not None:
        return fail("torch build", f"{found}, and {why}", _UPDATE)
    return ok("torch build", f"{found}; the driver serves CUDA {told(driver)}")


def why_too_old(build: TorchBuild, driver: str | None) -> str | None:
    """`driver`: the newest CUDA that it serves. It serves every CUDA of its own major version and
    of all before it. None: it is not, or that is not known."""
    if driver is None or build.cuda is None or _major(build.cuda) <= _major(driver):
        return None
    return f"the driver serves CUDA {driver} at most"


def refuse_old_driver(snapshot: Snapshot) -> None:
    """Raises NoGpuError: with that torch no GPU could be used."""
    build = torch_build() if snapshot.gpus else None
    if build is not None and (why := why_too_old(build, snapshot.cuda_driver_version)):
        found = f"torch {build.version} is for CUDA {build.cuda}"
        raise NoGpuError(f"{found}, and {why}: {_UPDATE}; --device cpu trains without")


def _check_package(need: Requirement, optional: str = "") -> Finding:
    """`optional`: the extra that it belongs to."""
    version, pin = installed(need.name), pins().get(normalised(need.name))
    if need.met_by(version):
        return ok(need.name, f"{version}")
    install = f"{sys.executable} -m pip install '{f'{need.name}=={pin}' if pin else need}'"
    if optional and version is None:
        return ok(need.name, f"absent (optional, extra '{optional}'; {install})")
    found = f"{version or 'absent'}, needs {need}"
    return (warn if optional else fail)(need.name, found, install)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
