"""One connection between two launchers: a message a line, both ways, and no call waits."""

import socket
from contextlib import suppress

from launcher.nodes.messages import MAX_LINE_BYTES, Message, decode, encode

_CHUNK = 1 << 16
_ENDED = "its launcher ended without a word"


class Wire:
    """One connection, and what is on its way."""

    def __init__(self, socket_: socket.socket, now: float) -> None:
        socket_.setblocking(False)
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = socket_
        self.since = self.heard_at = now
        self.node: int | None = None
        """Who is at the other end; None: it has not said so."""
        self.garbled = b""
        """A line that this version's launchers do not write."""
        self._out = bytearray()
        self._in = bytearray()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._out += encode(message)
        self.flush()

    def flush(self) -> None:
        """What the kernel does not take now goes with the next call: a beat comes each second."""
        with suppress(OSError):  # the next read tells that it is broken
            while self._out:
                del self._out[: self.socket.send(self._out)]

    @property
    def is_flushed(self) -> bool:
        return not self._out

    @property
    def why_lost(self) -> str:
        """Where `read` has given None."""
        return "it said what no launcher says" if self.garbled else _ENDED

    def read(self, now: float) -> list[Message] | None:
        """What came whole; None: it is closed, or says what no launcher says."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        if not data or len(rest) > MAX_LINE_BYTES:
            return None
        found: list[Message] = []
        for line in lines:
            try:
                found.append(decode(line))
            except ValueError:
                self.garbled = line
                return None
        if found:
            self.heard_at = now
        return found

    def close(self) -> None:
        self.socket.close()
