"""How often the kernel ended a process of our cgroup for want of memory. Reads, starts nothing."""

from typing import Protocol

from msgspec import Struct

from launcher.contain.memory_cgroup import Membership


class OomCounter(Protocol):
    """The seam for tests."""

    def read(self) -> "OomCount | None":
        """None: there is no counter here."""


class OomCount(Struct, frozen=True):
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


class CgroupOom(Struct, frozen=True):
    """The counter of the cgroup that this process is in, version 2 or 1."""

    membership: Membership = Membership()

    def read(self) -> OomCount | None:
        for group in self.membership.groups():
            if (kills := group.oom_kills) is not None:
                return OomCount(kills, group.limit_bytes)
        return None


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
