"""What one worker is still to be told: never more than it can use, and nobody waits for it."""

import os

from launcher.output.streams import Stream
from model_check.events import Command, encode_command


class Outbox:
    """The latest command of each kind: an older one is obsolete."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        """Its socket, which reads and closes elsewhere; None: it is not started yet."""
        self._waiting: dict[type[Command], Command] = {}
        # Of a line that was begun.
        self._rest = b""

    def put(self, command: Command) -> None:
        self._waiting[type(command)] = command

    def send(self) -> bool:
        """Whether all is said. What a worker that is gone did not hear counts as said."""
        if self.stream is None:
            return False
        while line := self._rest or self._next_line():
            try:
                self._rest = line[self._write(line) :]
            except BlockingIOError:
                self._rest = line
                return False
        return True

    def _next_line(self) -> bytes:
        if not self._waiting:
            return b""
        return encode_command(self._waiting.pop(next(iter(self._waiting))))

    def _write(self, line: bytes) -> int:
        assert self.stream is not None
        if self.stream.fd is None:
            return len(line)
        try:
            return os.write(self.stream.fd, line)
        except (BrokenPipeError, ConnectionResetError):
            return len(line)
