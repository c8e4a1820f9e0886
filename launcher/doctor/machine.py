"""What the operating system grants: memory, cores, limits, the kernel's features, a container."""

import os
import platform
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from launcher.contain import linux
from launcher.contain.memory import memory_room
from launcher.doctor.finding import Finding, fail, ok, warn
from launcher.doctor.limits import LOW_SHM_BYTES, shared_memory_bytes

GIB = 1 << 30
LOW_MEMORY_GIB = 4.0
"""Two CPU workers of the `cpu` preset and the preparation of a token cache fit below."""
LOW_OPEN_FILES = 1024
LOW_PROCESSES = 1024

_CGROUP = Path("/sys/fs/cgroup")


def check_machine(environ: Mapping[str, str]) -> list[Finding]:
    return [
        _kernel(),
        _container(environ),
        _cores(),
        _memory(),
        _shared_memory(),
        _open_files(),
        _processes(),
    ]


def _kernel() -> Finding:
    """Everything that the supervisor needs of it, tried on this very process."""
    name = f"Linux {platform.release()}"
    try:
        pidfd = linux.pidfd_open(os.getpid())
        linux.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)
    except OSError as error:
        return fail(
            "kernel",
            f"{name}: no pidfd ({error.strerror})",
            "needs Linux 5.4 or newer; an old container runtime may block the call",
        )
    try:
        linux.set_child_subreaper(linux.set_child_subreaper(True))
    except OSError as error:
        return fail("kernel", f"{name}: no subreaper ({error.strerror})", "allow prctl")
    return ok("kernel", f"{name}: pidfd, subreaper")


def _container(environ: Mapping[str, str]) -> Finding:
    if "KUBERNETES_SERVICE_HOST" in environ:
        kind = "Kubernetes"
    elif Path("/.dockerenv").exists():
        kind = "Docker"
    elif Path("/run/.containerenv").exists():
        kind = "Podman"
    else:
        kind = environ.get("container") or "none seen"
    return ok("container", kind)


def _cores() -> Finding:
    return ok("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    found = f"{available / GIB:.1f} GiB available"
    if (room := memory_room()) is not None:
        found += f", {room.left_bytes / GIB:.1f} GiB left of this control group's "
        found += f"{room.limit_bytes / GIB:.1f} GiB"
        available = min(available, room.left_bytes)
    if available < LOW_MEMORY_GIB * GIB:
        return warn("memory", found, "fewer --workers, or a smaller model")
    return ok("memory", found)


def _shared_memory() -> Finding:
    size = shared_memory_bytes()
    if size is None:
        return warn("/dev/shm", "missing", "mount a tmpfs there")
    found = f"{size / GIB:.2f} GiB"
    if size < LOW_SHM_BYTES:
        return warn("/dev/shm", found, "start the container with --shm-size=8g or --ipc=host")
    return ok("/dev/shm", found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, raised to {_limit(hard)} for workers"
    if hard != resource.RLIM_INFINITY and hard < LOW_OPEN_FILES:
        return warn("open files", found, f"raise the hard limit (ulimit -Hn) to {LOW_OPEN_FILES}")
    return ok("open files", found)


def _processes() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [n for n in (soft, _cgroup_number("pids.max")) if n not in (None, -1)]
    allowed = min((n for n in limits if n is not None), default=resource.RLIM_INFINITY)
    if allowed != resource.RLIM_INFINITY and allowed < LOW_PROCESSES:
        return warn("processes", f"{allowed} allowed", "raise ulimit -u or --pids-limit")
    return ok("processes", f"{_limit(allowed)} allowed")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _cgroup_number(name: str) -> int | None:
    """A limit of the control group that a container sees as its root; None: none, or no cgroup
    v2."""
    with suppress(OSError, ValueError):
        return int((_CGROUP / name).read_text())
    return None
