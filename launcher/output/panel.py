"""A few lines that stay below what a terminal is told, and are drawn again in their place."""

import os
import re
import time
from collections.abc import Callable, Sequence

from model_check.utils.words import printable

REDRAW_S = 0.25
_LEAST_COLUMNS, _LEAST_ROWS = 40, 8
_ASLEEP_S = 2.0
"""Whoever was stopped for so long does not know what the terminal shows by now."""
_STEP_LINE = re.compile(r"(?:^|\] )(?:Step|Details|Speed) \[\d+/\d+\] \|")
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Of what a terminal shows at once, if it knows of that; others ignore both."""
_CODES = re.compile(r"\x1b\[[0-9;]*m")
Draw = Callable[[int, int], Sequence[str]]
"""(columns, rows) -> lines that fit, one behind the other, with or without colours."""


def can_have_one(fd: int) -> bool:
    """Whether `fd` is a terminal that can move its cursor."""
    return os.isatty(fd) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def other_lines(texts: Sequence[str]) -> list[str]:
    """Returns the lines that are of no step: a panel shows steps."""
    return [text for text in texts if not _STEP_LINE.search(text)]


class Panel:
    """It belongs to the thread that writes; others may `show`, `hide` and ask."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._draw: Draw | None = None
        self._shown: list[str] = []
        self._drawn: list[str] = []
        self._drawn_at = self._awake_at = float("-inf")
        self.has_place = False
        """False while another program has the terminal, and where there is no room."""

    @property
    def is_wanted(self) -> bool:
        return self._draw is not None

    @property
    def is_shown(self) -> bool:
        return bool(self._shown)

    def show(self, draw: Draw) -> None:
        """Keep what `draw` makes below all lines from now on."""
        self.has_place, self._draw = self._finds_place(), draw
        self._drawn_at = float("-inf")

    def hide(self) -> None:
        self._draw = None

    def below(self, data: bytes) -> bytes:
        """Returns what puts `data`, whole lines, above the panel; nothing where nothing is new."""
        draw, now = self._draw, time.monotonic()
        if draw is None and not self._shown:
            return data
        if now - self._awake_at > _ASLEEP_S or not self._is_ours():
            self._shown = []  # it stays as it is: others may have written below it
        if draw is None:
            self._drawn = []
        elif now - self._drawn_at >= REDRAW_S:
            self._drawn, self._drawn_at = self._lines(draw), now
        if (not data or not self._drawn) and self._drawn == self._shown:
            return data
        text = "".join(f"{line}\x1b[K\n" for line in self._drawn)
        before, self._shown = self._erase(), self._drawn
        return (_BEGIN + before).encode() + data + (text + _END).encode(errors="backslashreplace")

    def wrote(self) -> None:
        """What `below` returned has been written, however long that took."""
        self._awake_at = time.monotonic()

    def _lines(self, draw: Draw) -> list[str]:
        self.has_place = self._finds_place()
        if not self.has_place:
            return []
        columns, rows = self._size()
        try:
            return [*draw(columns, rows - 1)]
        except Exception as error:  # the lines above it matter more
            return [printable(f"no live table: {type(error).__name__}: {error}")[: columns - 1]]

    def _finds_place(self) -> bool:
        columns, rows = self._size()
        return columns >= _LEAST_COLUMNS and rows >= _LEAST_ROWS and self._is_ours()

    def _size(self) -> tuple[int, int]:
        """Returns columns and rows; (0, 0) where a terminal tells none, or is gone."""
        try:
            return os.get_terminal_size(self._fd)
        except OSError:
            return 0, 0

    def _is_ours(self) -> bool:
        """Whether no other program has the terminal by now."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it controls no session: nobody else asks
            return True

    def _erase(self) -> str:
        """Returns what goes back to its first line and clears all below. A terminal that has become
        narrower has broken its lines."""
        if not self._shown:
            return ""
        columns = max(1, self._size()[0])
        widths = [len(_CODES.sub("", line)) for line in self._shown]
        rows = sum(max(1, -(-width // columns)) for width in widths)
        return f"\r\x1b[{rows}A\x1b[J"
