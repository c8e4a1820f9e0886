"""How many cores this process may use."""

import os
from contextlib import suppress
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = _QUOTA) -> int:
    """The cores of the process's affinity, at most as many as the container's CPU quota (cgroup v2)
    pays for: on a big node with a small quota, one process a core would only take memory."""
    cores = len(os.sched_getaffinity(0))
    # No quota: there is no such file, or it says "max".
    with suppress(OSError, ValueError):
        quota, period = map(int, quota_file.read_text().split())
        return max(1, min(cores, -(-quota // period)))
    return cores
