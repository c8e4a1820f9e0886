"""How often the kernel ended a process of our cgroup for want of memory. Reads, starts nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 says "none" as the largest number of pages."""


class OomCounter(Protocol):
    """The seam for tests."""

    def read(self) -> "OomCount | None":
        """None: there is no counter here."""


@dataclass(frozen=True)
class OomCount:
    kills: int
    limit_bytes: int | None
    """Of this cgroup; None: it has none of its own (its parents, or the machine, may)."""

    def describe(self) -> str:
        """What may be said of a death by SIGKILL when `kills` moved."""
        limit = "no limit" if self.limit_bytes is None else f"limit {_bytes(self.limit_bytes)}"
        return f"the cgroup counted an OOM kill ({limit})"


class OomWatch:
    """From now on: make it before the first worker starts."""

    def __init__(self, counter: OomCounter) -> None:
        self._counter = counter
        self._before = counter.read()

    def moved(self) -> str | None:
        """In words, if the kernel has ended anybody of our cgroup since."""
        now = self._counter.read()
        if self._before is None or now is None or now.kills <= self._before.kills:
            return None
        return now.describe()


@dataclass(frozen=True)
class CgroupOom:
    """The counter of the cgroup that this process is in, version 2 or 1."""

    membership: Path = Path("/proc/self/cgroup")
    root: Path = Path("/sys/fs/cgroup")

    def read(self) -> OomCount | None:
        for directory, counter, limit in self._candidates():
            kills = re.search(r"^oom_kill (\d+)$", _text(directory / counter), re.M)
            if kills is not None:
                return OomCount(int(kills[1]), _limit(_text(directory / limit)))
        return None

    def _candidates(self) -> Iterator[tuple[Path, str, str]]:
        """Version 1 first: where its memory controller is mounted, version 2 has none."""
        lines = [line.split(":", 2) for line in _text(self.membership).splitlines()]
        for line in lines:
            if len(line) == 3 and "memory" in line[1].split(","):
                for directory in _upwards(self.root / "memory", line[2]):
                    yield directory, "memory.oom_control", "memory.limit_in_bytes"
        for line in lines:
            if len(line) == 3 and line[:2] == ["0", ""]:
                for directory in _upwards(self.root, line[2]):
                    yield directory, "memory.events", "memory.max"


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's directory and those above it. A container may mount its own cgroup where the
    path, as the host has it, leads nowhere: the mount itself is it then."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _limit(text: str) -> int | None:
    number = text.strip()
    return int(number) if number.isdigit() and int(number) < _NO_LIMIT_BYTES else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
