"""How much memory the control groups of this process still grant. Reads only.

A container's limit is what ends a run there, however much the host has free.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 says "none" as the largest number of pages."""


class _Files(NamedTuple):
    limit: str
    used: str
    reclaimable: str
    """In memory.stat: page cache that the kernel drops before it ends a process."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


class MemoryRoom(NamedTuple):
    """The tightest limit, and what is left below it."""

    limit_bytes: int
    left_bytes: int


@dataclass(frozen=True)
class CgroupMemory:
    """The memory controller of version 2 or 1, wherever this process is in it."""

    membership: Path = Path("/proc/self/cgroup")
    root: Path = Path("/sys/fs/cgroup")

    def room(self) -> MemoryRoom | None:
        """None: no control group limits the memory. A limit of any group above ours counts."""
        rooms = [room for directory, files in self._groups() if (room := _room(directory, files))]
        return min(rooms, key=lambda room: room.left_bytes, default=None)

    def _groups(self) -> Iterator[tuple[Path, _Files]]:
        for line in _text(self.membership).splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if "memory" in controllers.split(","):
                yield from ((place, _V1) for place in _upwards(self.root / "memory", path))
            elif (number, controllers) == ("0", ""):
                yield from ((place, _V2) for place in _upwards(self.root, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's directory and those above it. A container may mount its own group where the
    path, as the host has it, leads nowhere: the mount itself is it then."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _room(directory: Path, files: _Files) -> MemoryRoom | None:
    limit, used = _number(directory / files.limit), _number(directory / files.used)
    if limit is None or limit >= _NO_LIMIT_BYTES or used is None:
        return None
    stat = _text(directory / "memory.stat")
    found = re.search(rf"^{files.reclaimable} (\d+)$", stat, re.M)
    reclaimable = int(found[1]) if found else 0
    return MemoryRoom(limit, max(0, limit - used + min(reclaimable, used)))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
