"""The control groups that limit this process's memory, version 1 or 2: what they still grant, and
how often the kernel ended a process of ours for want of it. Reads files, starts nothing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 says "none" as the largest number of pages."""


class Names(NamedTuple):
    """What a version of cgroups calls the same things."""

    limit: str
    used: str
    oom_kills: str
    """The file with the counter `oom_kill`."""
    reclaimable: str
    """The counter in memory.stat of page cache that the kernel drops before it ends a process."""


_V1 = Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"
)
_V2 = Names("memory.max", "memory.current", "memory.events", "inactive_file")


class MemoryRoom(NamedTuple):
    """A limit, and what is left below it."""

    limit_bytes: int
    left_bytes: int


class Group(Struct, frozen=True):
    """One control group's directory. What its files do not tell is None."""

    directory: Path
    names: Names

    @property
    def limit_bytes(self) -> int | None:
        limit = self.find(self.names.limit, r"^(\d+)$")
        return None if limit is None or limit >= _NO_LIMIT_BYTES else limit

    @property
    def room(self) -> MemoryRoom | None:
        limit, used = self.limit_bytes, self.find(self.names.used, r"^(\d+)$")
        if limit is None or used is None:
            return None
        reclaimable = self.find("memory.stat", rf"^{self.names.reclaimable} (\d+)$") or 0
        return MemoryRoom(limit, max(0, limit - used + min(reclaimable, used)))

    def find(self, file: str, pattern: str) -> int | None:
        """The number that `pattern` captures in this file of the group."""
        found = re.search(pattern, _text(self.directory / file), re.M)
        return int(found[1]) if found else None


class Membership(Struct, frozen=True):
    """Which control groups this process is in."""

    file: Path = Path("/proc/self/cgroup")
    root: Path = Path("/sys/fs/cgroup")

    def groups(self) -> Iterator[Group]:
        """Its own, then those above it. Version 1 first: where its memory controller is mounted,
        version 2 has none."""
        lines = [line.split(":", 2) for line in _text(self.file).splitlines()]
        whole = [line for line in lines if len(line) == 3]
        for _, controllers, path in whole:
            if "memory" in controllers.split(","):
                yield from (Group(place, _V1) for place in _upwards(self.root / "memory", path))
        for number, controllers, path in whole:
            if (number, controllers) == ("0", ""):
                yield from (Group(place, _V2) for place in _upwards(self.root, path))


HERE = Membership()
"""Where the kernel says it of this process."""


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's directory and those above it. A container may mount its own group where the
    path, as the host has it, leads nowhere: the mount itself is it then."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def memory_room(membership: Membership = HERE) -> MemoryRoom | None:
    """What the control groups of this process still grant: a container's limit is what ends a run
    there, however much the host has free. The tightest of all groups above counts; None: none of
    them limits the memory."""
    rooms = [group.room for group in membership.groups()]
    return min(filter(None, rooms), key=lambda room: room.left_bytes, default=None)


class OomCount(NamedTuple):
    """How often the kernel ended a process of a control group for want of memory."""

    kills: int
    limit_bytes: int | None
    """Of this group; None: it has none of its own (its parents, or the machine, may)."""

    def describe(self) -> str:
        """What may be said of a death by SIGKILL when `kills` moved."""
        limit = "no limit" if self.limit_bytes is None else f"limit {_bytes(self.limit_bytes)}"
        return f"the cgroup counted an OOM kill ({limit})"


def oom_count(membership: Membership) -> OomCount | None:
    """The count of the control group that this process is in; None: there is no counter here."""
    for group in membership.groups():
        if (kills := group.find(group.names.oom_kills, r"^oom_kill (\d+)$")) is not None:
            return OomCount(kills, group.limit_bytes)
    return None


class OomWatch:
    """Whether the counter moved since this was made: make it before the first worker starts."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._before = oom_count(membership)

    def moved(self) -> str | None:
        """In words, if the kernel has ended a process of our control group since."""
        now = oom_count(self._membership)
        if self._before is None or now is None or now.kills <= self._before.kills:
            return None
        return now.describe()


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
