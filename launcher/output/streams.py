"""What comes out of a worker: output and events. To the files first, as the bytes they are."""

import fcntl
import os
import termios
import time
from array import array
from collections.abc import Callable

import msgspec

from launcher.output.append_file import AppendFile
from launcher.output.printer import Printer
from launcher.output.view import View
from model_check.events import Event, decode
from model_check.utils.secrets import masked

READ_BYTES = 1 << 16  # the capacity of a pipe
MAX_EVENT_BYTES = 1 << 20

Feed = Callable[[bytes], None]
"""Takes what a stream carries."""
Ended = Callable[[], None]
"""Called at the end of file."""


class Stream:
    """Our non-blocking end of a pipe or socket, and what takes its bytes."""

    def __init__(self, fd: int, feed: Feed, ended: Ended) -> None:
        self.fd: int | None = fd
        self._feed = feed
        self._ended = ended

    def read(self) -> int | None:
        """Feed what is there, up to READ_BYTES. How many bytes that were; None: the end, close
        it."""
        if self.fd is None:
            return None
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return 0
        except ConnectionResetError:  # a socket whose worker died with our bytes unread
            return None
        if data:
            self._feed(data)
        return len(data) or None

    def drain(self) -> bool:
        """Feed what is there now, but not what is written meanwhile: a process that our worker left
        behind may write without end. False: that was the end, close it."""
        num_left = 0 if self.fd is None else _num_waiting(self.fd)
        while num_left >= 0:  # one read more than there is: it finds the end
            num_bytes = self.read()
            if not num_bytes:
                return num_bytes is not None
            num_left -= num_bytes
        return True

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            self._ended()


def _num_waiting(fd: int) -> int:
    """Bytes that a read would find now."""
    num_bytes = array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, num_bytes)
    return num_bytes[0]


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

    def feed(self, data: bytes) -> None:
        self._log.write(data)
        self._show(self._view.feed(data, time.monotonic()))

    def close(self) -> None:
        self._show(self._view.close())
        self._log.close()

    def _show(self, lines: list[str]) -> None:
        if lines:
            self._printer.lines(self._prefix, lines)
            self._seen(lines)


class Events:
    """A worker's events: byte for byte to their file, decoded to `hear`."""

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
        # Whether the rest of this line is skipped: it is too long to be an event.
        self._skips = False

    def feed(self, data: bytes) -> None:
        self._file.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._skips:
            del lines[0]
            self._skips = False
        for line in filter(bytes.strip, lines):
            self._decode(line)
        if len(self._rest) > MAX_EVENT_BYTES:
            self._complain_once(f"an event line is above {MAX_EVENT_BYTES} bytes")
            self._skips = True
        if self._skips:
            self._rest = b""

    def close(self) -> None:
        """Drop a last line without a newline: the worker's death tore it, which is no mistake."""
        self._file.close()

    def _decode(self, line: bytes) -> None:
        try:
            event = decode(line)
        except msgspec.DecodeError as error:
            # Masked before it is cut: half a secret is none to the printer.
            quoted = masked(repr(line))[:200]
            self._complain_once(f"an event line can't be read: {error}: {quoted}")
            return
        self._hear(event)

    def _complain_once(self, what: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._complain(f"{what}; it stays in the file, and more like it go unmentioned")
