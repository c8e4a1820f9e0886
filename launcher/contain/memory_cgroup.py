"""The control groups that limit this process's memory, version 2 or 1, as files. Reads only."""

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


class Group(Struct, frozen=True):
    """One group's directory; a file that is not there tells nothing (None)."""

    directory: Path
    names: Names

    @property
    def limit_bytes(self) -> int | None:
        limit = self._number(self.names.limit)
        return None if limit is None or limit >= _NO_LIMIT_BYTES else limit

    @property
    def used_bytes(self) -> int | None:
        return self._number(self.names.used)

    @property
    def reclaimable_bytes(self) -> int | None:
        return self._counter("memory.stat", self.names.reclaimable)

    @property
    def oom_kills(self) -> int | None:
        return self._counter(self.names.oom_kills, "oom_kill")

    def _number(self, name: str) -> int | None:
        text = _text(self.directory / name).strip()
        return int(text) if text.isdigit() else None

    def _counter(self, file: str, name: str) -> int | None:
        found = re.search(rf"^{name} (\d+)$", _text(self.directory / file), re.M)
        return int(found[1]) if found else None


class Membership(Struct, frozen=True):
    """Where this process is."""

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
