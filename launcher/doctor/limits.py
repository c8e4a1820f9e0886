"""Limits of this machine that every run meets, a foreign command's too: open files, /dev/shm.

Imports little: every start waits for it.
"""

import os
import resource

_FILES_A_WORKER = 5
_OWN_FILES = 32
LOW_SHM_BYTES = 1 << 28
"""A container's usual 64 MiB make loaders and NCCL die of SIGBUS."""


def check_command(num_workers: int) -> list[str]:
    """What a person should know before a foreign command starts, of which little is known."""
    return [*check_shared_memory(shared_memory_bytes()), *check_open_files(num_workers)]


def check_open_files(num_workers: int) -> list[str]:
    """A note when the hard limit is too low for the launcher itself."""
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], num_workers * _FILES_A_WORKER
    needed += _OWN_FILES
    if hard == resource.RLIM_INFINITY or hard >= needed:
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
        "(start the container with --shm-size=8g or --ipc=host)"
    ]


def shared_memory_bytes() -> int | None:
    """The size of /dev/shm; None: there is none."""
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return None
    return disk.f_frsize * disk.f_blocks
