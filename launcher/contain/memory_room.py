"""How much memory the control groups of this process still grant.

A container's limit is what ends a run there, however much the host has free.
"""

from typing import NamedTuple

from launcher.contain.memory_cgroup import Group, Membership


class MemoryRoom(NamedTuple):
    """The tightest limit, and what is left below it."""

    limit_bytes: int
    left_bytes: int


def memory_room(membership: Membership | None = None) -> MemoryRoom | None:
    """None: no control group limits the memory. A limit of any group above ours counts."""
    groups = (membership or Membership()).groups()
    rooms = [room for group in groups if (room := _room(group)) is not None]
    return min(rooms, key=lambda room: room.left_bytes, default=None)


def _room(group: Group) -> MemoryRoom | None:
    limit, used = group.limit_bytes, group.used_bytes
    if limit is None or used is None:
        return None
    reclaimable = min(group.reclaimable_bytes or 0, used)
    return MemoryRoom(limit, max(0, limit - used + reclaimable))
