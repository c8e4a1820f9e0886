"""What the operating system grants: memory, cores, limits, the kernel's features.

As findings of the doctor, and as the notes that a start gives on what is too low. Imports little:
every start waits for it.
"""

import os
import platform
import resource
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.contain import cgroup, linux
from launcher.contain.memory import memory_room
from launcher.contain.processes import describe_stuck
from launcher.doctor.finding import GIB, Finding, fail, gib, ok, warn, warn_if
from model_check.utils.host_memory import available_memory_bytes

LOW_MEMORY_GIB = 4.0
"""Two CPU workers of the `cpu` preset and the preparation of a token cache need less."""
LOW_OPEN_FILES = 1024
LOW_PROCESSES = 1024
LOW_SHM_BYTES = 1 << 28
"""A container's usual 64 MiB make loaders and NCCL die of SIGBUS."""

_FILES_A_WORKER = 5
_OWN_FILES = 32
_UNLIMITED = float("inf")
_MORE_SHM = "start the container with --shm-size=8g or --ipc=host"
_MAX_NAMED = 8
_SURVIVES = (
    "a child that leaves its session and empties its environment, or changes its user, survives a "
    "SIGKILL of the launcher"
)
_DELEGATE = (
    "needs cgroups of version 2 and the right to make one: root, or "
    "`systemd-run --user --scope -p Delegate=yes`; in a container, a writable /sys/fs/cgroup"
)


def check_machine() -> list[Finding]:
    return [
        _kernel(),
        ok("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used"),
        _memory(),
        _shared_memory(),
        _open_files(),
        _processes(),
        check_containment(),
        check_cgroups(),
    ]


def _kernel() -> Finding:
    """What the supervisor needs and a kernel or a container may refuse."""
    name = f"Linux {platform.release()}"
    try:
        linux.check_pidfds()
    except OSError as error:
        return fail("kernel", f"{name}: no pidfd", str(error))
    return ok("kernel", f"{name}: pidfd")


def _memory() -> Finding:
    available = available_memory_bytes()
    found = f"{gib(available)} available"
    if (room := memory_room()) is not None:
        found += f", {gib(room.left_bytes)} left of this control group's {gib(room.limit_bytes)}"
        available = min(available, room.left_bytes)
    is_low = available < LOW_MEMORY_GIB * GIB
    return warn_if(is_low, "memory", found, "fewer --workers, or a smaller model")


def _shared_memory() -> Finding:
    size = shared_memory_bytes()
    if size is None:
        return warn("/dev/shm", "missing", "mount a tmpfs there")
    return warn_if(size < LOW_SHM_BYTES, "/dev/shm", f"{size / GIB:.2f} GiB", _MORE_SHM)


def _open_files() -> Finding:
    soft, hard = _limits(resource.RLIMIT_NOFILE)
    raised = "" if soft == hard else f", raised to {_number(hard)} for workers"
    found = f"{_number(soft)}{raised}"
    advice = f"raise the hard limit (ulimit -Hn) to {LOW_OPEN_FILES}"
    return warn_if(hard < LOW_OPEN_FILES, "open files", found, advice)


def _processes() -> Finding:
    allowed = _limits(resource.RLIMIT_NPROC)[0]
    # The limit of the control group that a container sees as its root, in version 2.
    with suppress(OSError, ValueError):
        allowed = min(allowed, int(Path("/sys/fs/cgroup/pids.max").read_text()))
    found, advice = f"{_number(allowed)} allowed", "raise ulimit -u or --pids-limit"
    return warn_if(allowed < LOW_PROCESSES, "processes", found, advice)


def check_containment() -> Finding:
    """Whether a process can enter a cgroup that a run would make here: it tries."""
    name, made = "containment", cgroup.make()
    if made is None:
        return warn(name, f"no cgroup of version 2 can be made: {_SURVIVES}", _DELEGATE)
    # sh writes it by itself, so it is sh that enters.
    enters = subprocess.run(
        ("/bin/sh", "-c", "echo 0"), stdout=made.entry_fd, stderr=subprocess.DEVNULL
    )
    cgroup.clear(made.directory)
    made.close()
    if enters.returncode != 0:
        return warn(name, f"workers cannot enter a cgroup: {_SURVIVES}", _DELEGATE)
    return ok(name, "a cgroup holds all that workers start")


def check_cgroups(mounts: Sequence[str] = cgroup.MOUNTS) -> Finding:
    """Cgroups of runs whose launcher and guardian were both killed, or that could not end a
    process. Reads only: the next run from the same cgroup clears them, or a person does."""
    places = (parent for mount in mounts for parent, _, _ in os.walk(mount))
    left = sorted({directory for parent in places for directory in cgroup.leftovers(parent)})
    name, found = "cgroups of runs", f"{len(left)} left behind"
    if not left:
        return ok(name, "none left behind")
    pids: list[int] = []
    for directory in left:
        with suppress(OSError):
            pids += map(int, Path(directory, "cgroup.procs").read_text().split())
    if pids:
        named = ", ".join(map(describe_stuck, pids[:_MAX_NAMED]))
        return warn(
            name, f"{found}; in them {named}", "the next run ends them; reboot if SIGKILL cannot"
        )
    advice = f"to remove them: rmdir {' '.join(left[:_MAX_NAMED])}"
    return Finding("ok", name, f"{found}, empty", advice)


# -- the notes of a start


def check_command(num_workers: int) -> list[str]:
    """What a person should know before a foreign command starts, of which little is known."""
    return [*check_shared_memory(shared_memory_bytes()), *check_open_files(num_workers)]


def check_open_files(num_workers: int) -> list[str]:
    """A note when the hard limit is too low for the launcher itself."""
    hard, needed = _limits(resource.RLIMIT_NOFILE)[1], num_workers * _FILES_A_WORKER + _OWN_FILES
    if hard >= needed:
        return []
    return [f"{hard} open files are allowed (ulimit -Hn) and {num_workers} workers take {needed}"]


def check_shared_memory(num_bytes: int | None) -> list[str]:
    """A note on a small /dev/shm (None: there is none): our trainer uses none of it, loaders of
    others and NCCL do."""
    if num_bytes is not None and num_bytes >= LOW_SHM_BYTES:
        return []
    size = "is missing" if num_bytes is None else f"has {num_bytes / 2**20:.0f} MiB"
    return [
        f"/dev/shm {size}: programs that load data in processes, or use NCCL, may die of SIGBUS "
        f"({_MORE_SHM})"
    ]


def shared_memory_bytes() -> int | None:
    """The size of /dev/shm; None: there is none."""
    with suppress(OSError):
        disk = os.statvfs("/dev/shm")
        return disk.f_frsize * disk.f_blocks
    return None


def _limits(kind: int) -> list[float]:
    """The soft and the hard limit."""
    both = resource.getrlimit(kind)
    return [_UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in both]


def _number(limit: float) -> str:
    return "unlimited" if limit == _UNLIMITED else str(limit)
