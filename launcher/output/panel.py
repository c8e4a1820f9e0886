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
    """Whether `fd` is a terminal that can move its cursor and has room: that of a container without
    a person has no size."""
    can_move = os.isatty(fd) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    return can_move and _has_room(fd)


def _has_room(fd: int) -> bool:
    columns, rows = os.get_terminal_size(fd)
    return columns >= _LEAST_COLUMNS and rows >= _LEAST_ROWS


def other_lines(texts: Sequence[str]) -> list[str]:
    """Those that a panel does not show: a step's line has its row there."""
    return [text for text in texts if not _STEP_LINE.search(text)]


class Panel:
    """Belongs to the thread that writes."""

    def __init__(self, fd: int, draw: Draw) -> None:
        self._fd, self._draw = fd, draw
        self._shown: list[str] = []
        self._drawn: list[str] = []
        self._drawn_at = float("-inf")
        self._awake_at = time.monotonic()

    def below(self, data: bytes, *, is_over: bool = False) -> bytes:
        """What to write so that `data`, whole lines, stands above the panel; nothing where nothing
        is new. `is_over`: the panel goes."""
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
        """None while another program has the terminal, or where there is no room."""
        if not (_has_room(self._fd) and self._is_ours()):
            return []
        columns, rows = os.get_terminal_size(self._fd)
        try:
            return [*self._draw(columns, rows - 1)]
        except Exception as error:  # the lines above it matter more
            return [f"no live table: {type(error).__name__}: {error}"[: columns - 1]]

    def _is_ours(self) -> bool:
        """Whether no other program has the terminal by now."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it controls no session: nobody else asks
            return True

    def _erase(self) -> str:
        """Back to its first line, and all below it cleared. A terminal that has become narrower has
        broken its lines."""
        if not self._shown:
            return ""
        columns = max(1, os.get_terminal_size(self._fd).columns)
        widths = [len(_CODES.sub("", line)) for line in self._shown]
        rows = sum(max(1, -(-width // columns)) for width in widths)
        return f"\r\x1b[{rows}A\x1b[J"
