"""How much memory this machine has, as /proc/meminfo tells it (to import psutil takes 7 ms of each
run)."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def host_memory_bytes() -> int:
    """Memory and swap, in use or not: more than any process ever gets."""
    told = _told()
    return told["MemTotal"] + told.get("SwapTotal", 0)


def available_memory_bytes() -> int:
    """What new processes can get without swapping, as the kernel estimates it."""
    return _told()["MemAvailable"]


def _told() -> dict[str, int]:
    """`MemTotal:  24546440 kB`; lines without a unit are counts."""
    rows = [line.split() for line in _MEMINFO.read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[2:] == ["kB"]}
