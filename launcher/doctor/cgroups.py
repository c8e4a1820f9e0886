"""Cgroups of runs whose launcher and guardian were both killed, or that could not end a process."""

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.contain import cgroup
from launcher.contain.processes import describe_stuck
from launcher.doctor.finding import Finding, ok, warn

_MAX_NAMED = 8


def check_cgroups(mounts: Sequence[str] = cgroup.MOUNTS) -> Finding:
    """Reads only: the next run from the same cgroup removes the empty ones, or a person does."""
    places = (parent for mount in mounts for parent, _, _ in os.walk(mount))
    left = sorted({directory for parent in places for directory in cgroup.leftovers(parent)})
    name = "cgroups of runs"
    if not left:
        return ok(name, "none left behind")
    found = f"{len(left)} left behind"
    pids = [pid for directory in left for pid in _pids(directory)]
    if pids:
        named = ", ".join(map(describe_stuck, pids[:_MAX_NAMED]))
        return warn(name, f"{found}; in them {named}", "SIGKILL did not end it: reboot, if need be")
    shown = " ".join(left[:_MAX_NAMED])
    return Finding("ok", name, f"{found}, empty", f"to remove them: rmdir {shown}")


def _pids(directory: str) -> list[int]:
    try:
        return [int(line) for line in Path(directory, "cgroup.procs").read_text().split()]
    except OSError:
        return []
