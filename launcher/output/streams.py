"""What comes out of a worker: output and events. To the files first, as the bytes they are."""

import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from launcher.output.append_file import AppendFile
from launcher.output.printer import Printer
from launcher.output.view import View
from model_check.events import Event, decode

READ_BYTES = 1 << 16  # the capacity of a pipe
MAX_EVENT_BYTES = 1 << 20


class Sink(Protocol):
    """Takes what a stream carries."""

    def feed(self, data: bytes, now: float) -> None: ...

    def close(self, now: float) -> None:
        """End of file."""


class Stream:
    """Our non-blocking end of a pipe or socket, and what takes its bytes."""

    def __init__(self, fd: int, sink: Sink) -> None:
        self.fd: int | None = fd
        self.last_read_bytes = 0
        self._sink = sink

    def pump(self, now: float, num_reads: int = 1) -> bool:
        """Read what is there, a bounded part of it; False: this was the end, close it."""
        self.last_read_bytes = 0
        for _ in range(num_reads):
            if self.fd is None:
                return False
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return True
            except ConnectionResetError:  # a socket whose worker died with our bytes unread
                return False
            if not data:
                return False
            self.last_read_bytes = len(data)
            self._sink.feed(data, now)
        return True

    def close(self, now: float) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            self._sink.close(now)


class Output:
    """A worker's standard output and error: byte for byte to its log, as lines to the terminal."""

    def __init__(
        self, log: AppendFile, printer: Printer, prefix: str, seen: Callable[[list[str]], None]
    ) -> None:
        self._log = log
        self._printer = printer
        self._prefix = prefix
        self._seen = seen
        self._view = View()

    @property
    def next_due(self) -> float | None:
        """When `tick` has something to do."""
        return self._view.next_due

    def feed(self, data: bytes, now: float) -> None:
        self._log.write(data)
        self._show(self._view.feed(data, now))

    def tick(self, now: float) -> None:
        self._show(self._view.tick(now))

    def close(self, now: float) -> None:
        self._show(self._view.close())
        self._log.close()

    def _show(self, lines: list[str]) -> None:
        if lines:
            self._printer.lines(self._prefix, lines)
            self._seen(lines)


class Events:
    """A worker's events: byte for byte to their file, decoded to whoever listens."""

    def __init__(
        self,
        file: AppendFile,
        hear: Callable[[Event], None],
        complain: Callable[[str], None],
    ) -> None:
        self._file = file
        self._hear = hear
        self._complain = complain
        self._has_complained = False
        self._rest = b""
        self._skips = False  # inside a line that is too long to be an event

    def feed(self, data: bytes, now: float) -> None:
        self._file.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._skips:
                self._skips = False
            elif line.strip():
                self._decode(line)
        if len(self._rest) > MAX_EVENT_BYTES or self._skips:
            if not self._skips:
                self._complain_once(f"an event line is above {MAX_EVENT_BYTES} bytes")
            self._rest, self._skips = b"", True

    def close(self, now: float) -> None:
        """A last line without a newline was torn by the worker's death: nobody's mistake."""
        self._file.close()

    def _decode(self, line: bytes) -> None:
        try:
            event = decode(line)
        except msgspec.DecodeError as error:
            self._complain_once(f"an event line can't be read: {error}: {line[:200]!r}")
            return
        self._hear(event)

    def _complain_once(self, what: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._complain(f"{what}; it stays in the file, and more like it go unmentioned")


class Report:
    """The trampoline's word: nothing, then end of file, when the command's own code runs."""

    def __init__(self, ended: Callable[[bytes], None]) -> None:
        self._ended = ended
        self._text = b""

    def feed(self, data: bytes, now: float) -> None:
        self._text += data

    def close(self, now: float) -> None:
        self._ended(self._text)
