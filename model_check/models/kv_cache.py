"""The keys and values of a text so far: appended to token by token, and copied seldom.

Shapes: B batch, G key/value heads, n positions so far, T more of them, D width of a head.
"""

from dataclasses import dataclass

from torch import Tensor

STRIDE = 256
"""Positions of room that are made at once."""


@dataclass
class _Room:
    rows: Tensor
    """[B, G, m, D], the first `num_used` of m written."""
    num_used: int


class Cached:
    """[B, G, n, D]. Appending makes another one, in the room that is left, and this one stays as it
    is: two texts can go on from it."""

    def __init__(self, first_BGTD: Tensor) -> None:
        self._room, self.num = _Room(first_BGTD, first_BGTD.shape[2]), first_BGTD.shape[2]

    @property
    def rows(self) -> Tensor:
        """[B, G, n, D]"""
        return self._room.rows[:, :, : self.num]

    def appended(self, more_BGTD: Tensor) -> "Cached":
        longer = Cached(self.rows)
        longer.num = self.num + more_BGTD.shape[2]
        longer._room = self._room_for(longer.num)
        longer._room.rows[:, :, self.num : longer.num] = more_BGTD
        longer._room.num_used = longer.num
        return longer

    def _room_for(self, num: int) -> _Room:
        """This one's, where nobody has appended to it yet; else a copy."""
        has_room = num <= self._room.rows.shape[2]
        if has_room and self._room.num_used == self.num:
            return self._room
        batch, heads, _, width = self._room.rows.shape
        larger = self.rows.new_empty(batch, heads, num + STRIDE, width)
        larger[:, :, : self.num] = self.rows
        return _Room(larger, self.num)
