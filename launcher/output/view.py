"""What a terminal is shown of a worker's bytes: whole, safe lines. Pure: time is passed in.

The log file has the exact bytes; this is only a view of them.
"""

import codecs

from model_check.utils.words import escape

MAX_LINE_BYTES = 64 * 1024
CONTINUES = " [line goes on]"
FRAME_INTERVAL_S = 1.0
# For the text: a prefix, the mark and the newline fit in what is left of 64 KiB.
_ROOM = MAX_LINE_BYTES - 512
_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n\r"
# The state of a decoder that does not wait for the rest of a character.
_NOTHING_HELD = (b"", 0)


class View:
    """Bytes in, lines out. A line that `\\r` redraws (a progress bar) shows a whole frame when
    bytes come, at most one a second, and its last frame when the line ends."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # What no newline and no `\r` has ended yet.
        self._pending = ""
        # The newest whole frame of this line that is not blank, if any.
        self._frame = ""
        # The frame of this line that was shown last.
        self._shown: str | None = None
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that `data` completes; a partial one is kept for later."""
        lines = self._take(self._text(data))
        is_due = now >= self._shown_at + FRAME_INTERVAL_S
        if self._frame and self._frame != self._shown and is_due:
            self._shown, self._shown_at = self._frame, now
            lines += _pieces(self._frame)
        return lines

    def close(self) -> list[str]:
        """The rest: a last line without a newline, half a character."""
        lines = self._take(escape(self._decoder.decode(b"", final=True)))
        return lines + (self._end_line(self._pending) if self._pending or self._frame else [])

    def _text(self, data: bytes) -> str:
        """`data` decoded, safe to print. Plain text, nearly all there is, is not searched twice."""
        if not data.translate(None, _PLAIN) and self._decoder.getstate() == _NOTHING_HELD:
            return data.decode("ascii")
        return escape(self._decoder.decode(data))

    def _take(self, text: str) -> list[str]:
        text = self._pending + text
        *ended, self._pending = text.split("\n")
        longest = max(map(len, ended), default=0)
        if max(longest, len(self._pending)) < _ROOM // 4 and "\r" not in text and not self._frame:
            return ended  # no line can be too long, none is redrawn
        lines = [piece for line in ended for piece in self._end_line(line)]
        if "\r" in self._pending:
            *frames, self._pending = self._pending.split("\r")
            self._frame = _last_frame([self._frame, *frames])
        while len(self._pending) > _ROOM:
            lines += [piece + CONTINUES for piece in _cut(self._pending[:_ROOM])]
            self._pending = self._pending[_ROOM:]
        return lines

    def _end_line(self, line: str) -> list[str]:
        if not self._frame and "\r" not in line:
            return _pieces(line)
        last = _last_frame([self._frame, *line.split("\r")])
        is_new = last != self._shown
        self._frame, self._shown = "", None
        return _pieces(last) if is_new else []


def _last_frame(frames: list[str]) -> str:
    """The last one that is not blank: a blank one clears a bar."""
    return next((frame for frame in reversed(frames) if frame.strip()), "")


def _pieces(line: str) -> list[str]:
    """`line` in pieces that are not above the limit; all but the last one are marked."""
    *pieces, last = _cut(line)
    return [*(piece + CONTINUES for piece in pieces), last]


def _cut(line: str) -> list[str]:
    """Pieces of `line`, none above the limit in UTF-8."""
    width = _ROOM if line.isascii() else _ROOM // 4
    return [line[at : at + width] for at in range(0, len(line), width)] or [""]
