"""A few lines that stay below what a terminal is told, and are drawn again in their place."""

import os
import re
import time
from collections.abc import Callable, Sequence

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
    """It belongs to the thread that writes; others may ask whether it `has_place`."""

    def __init__(self, fd: int, draw: Draw) -> None:
        self._fd, self._draw = fd, draw
        self._shown: list[str] = []
        self._drawn: list[str] = []
        self._drawn_at = float("-inf")
        self._awake_at = time.monotonic()
        self.has_place = self._finds_place()
        """False while another program has the terminal, and where there is no room."""

    def below(self, data: bytes, *, is_over: bool = False) -> bytes:
        """Returns what puts `data`, whole lines, above the panel; nothing where nothing is new.
        `is_over`: the panel goes."""
        now = time.monotonic()
        if now - self._awake_at > _ASLEEP_S:
            self._shown = []
        self._awake_at = now
        if now - self._drawn_at >= REDRAW_S:
            self._drawn, self._drawn_at = self._lines(), now
        lines = [] if is_over else self._drawn
        if not data and lines == self._shown:
            return b""
        text = "".join(f"{line}\x1b[K\n" for line in lines)
        before, self._shown = self._erase(), lines
        return (_BEGIN + before).encode() + data + (text + _END).encode()

    def _lines(self) -> list[str]:
        self.has_place = self._finds_place()
        if not self.has_place:
            return []
        columns, rows = self._size()
        try:
            return [*self._draw(columns, rows - 1)]
        except Exception as error:  # the lines above it matter more
            return [f"no live table: {type(error).__name__}: {error}"[: columns - 1]]

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
