"""What a terminal is shown of a worker's bytes: whole, safe lines. Pure: time is passed in.

The log file has the exact bytes; this is only a view of them.
"""

import codecs
import re

MAX_LINE_BYTES = 64 * 1024
CONTINUES = " [line goes on]"
FRAME_INTERVAL_S = 1.0
_ROOM = MAX_LINE_BYTES - 512
"""For the text: a prefix, the mark and the newline fit in what is left of 64 KiB."""
# Control bytes (C0 but tab, newline and carriage return; DEL; C1, where U+009B starts an escape
# sequence as ESC [ does) and the characters that reorder or break a line.
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n\r"
_NOTHING_HELD = (b"", 0)
"""The state of a decoder that waits for no rest of a character."""


def escape(text: str) -> str:
    """`text` with everything that could move the cursor, colour or reorder made visible: ESC is
    `\\x1b`."""
    return _UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class View:
    """Bytes in, lines out. A line that `\\r` redraws (a progress bar) shows its newest frame, at
    most one a second, and its last one when the line ends."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # the line that no newline has ended; of a bar, its newest frame
        self._is_bar = False
        self._frame = ""  # the newest frame that is surely whole and was not shown
        self._shown = ""  # what was shown of this bar, and when
        self._shown_at = float("-inf")
        self._fed_at = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that `data` completes; a partial one is kept for later."""
        self._fed_at = now
        lines = self._take(self._text(data))
        if self._is_bar and self._frame and now >= self._shown_at + FRAME_INTERVAL_S:
            lines += self._show(self._frame, now)
        return lines

    @property
    def next_due(self) -> float | None:
        """When `tick` has something to show; None: never, unless more is fed."""
        if not self._is_bar:
            return None
        if self._frame:
            return self._shown_at + FRAME_INTERVAL_S
        if self._newest_frame() in ("", self._shown):
            return None
        return max(self._fed_at, self._shown_at) + FRAME_INTERVAL_S

    def tick(self, now: float) -> list[str]:
        """The frame whose time has come, if any: a bar that went quiet shows where it stands."""
        due = self.next_due
        if due is None or now < due:
            return []
        quiet = now >= self._fed_at + FRAME_INTERVAL_S
        return self._show((quiet and self._newest_frame()) or self._frame, now)

    def close(self) -> list[str]:
        """The rest: a last line without a newline, half a character."""
        lines = self._take(escape(self._decoder.decode(b"", final=True)))
        return lines + (self._end_line(self._pending) if self._pending else [])

    def _text(self, data: bytes) -> str:
        """`data` decoded, safe to print. Plain text, nearly all there is, is not searched twice."""
        if not data.translate(None, _PLAIN) and self._decoder.getstate() == _NOTHING_HELD:
            return data.decode("ascii")
        return escape(self._decoder.decode(data))

    def _take(self, text: str) -> list[str]:
        text = self._pending + text
        *ended, self._pending = text.split("\n")
        if len(text) < _ROOM // 4 and not self._is_bar and "\r" not in text:
            return ended  # no line can be too long, none is redrawn
        lines = []
        for line in ended:
            lines += self._end_line(line)
        if "\r" in self._pending:
            self._redraw()
        while len(self._pending) > _ROOM:
            lines += [piece + CONTINUES for piece in _pieces(self._pending[:_ROOM])]
            self._pending = self._pending[_ROOM:]
        return lines

    def _end_line(self, line: str) -> list[str]:
        if "\r" not in line and not self._is_bar:
            return [line] if len(line) < _ROOM // 4 else _marked(_pieces(line))
        frames = [frame for frame in line.split("\r") if frame.strip()]
        last = frames[-1] if frames else self._frame
        repeated = self._is_bar and last in ("", self._shown)
        self._is_bar, self._frame, self._shown = False, "", ""
        return [] if repeated else _marked(_pieces(last))

    def _redraw(self) -> None:
        """Split the frames of the current line. A `\\r` at its very end may be half of `\\r\\n`."""
        line = self._pending.rstrip("\r")
        drawn, redrawn, newest = line.rpartition("\r")
        self._is_bar = self._is_bar or bool(redrawn)
        whole = [frame for frame in drawn.split("\r") if frame.strip()]
        self._frame = whole[-1] if whole else self._frame
        self._pending = newest + ("\r" if line != self._pending else "")

    def _newest_frame(self) -> str:
        frame = self._pending.rstrip("\r")
        return frame if frame.strip() else ""

    def _show(self, frame: str, now: float) -> list[str]:
        self._frame = ""
        if frame in ("", self._shown):
            return []
        self._shown, self._shown_at = frame, now
        return _marked(_pieces(frame))


def _pieces(line: str) -> list[str]:
    """`line` cut so that no piece is above the limit in UTF-8."""
    width = _ROOM if line.isascii() else _ROOM // 4
    return [line[at : at + width] for at in range(0, len(line), width)] or [""]


def _marked(pieces: list[str]) -> list[str]:
    return [piece + CONTINUES for piece in pieces[:-1]] + pieces[-1:]
