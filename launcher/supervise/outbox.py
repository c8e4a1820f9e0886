"""What one worker is still to be told: never more than it can use, and nobody waits for it."""

import os

from launcher.output.streams import Stream
from model_check.events import Command, Dump, encode_command


class Outbox:
    """All that is to be kept, before credit, with which a worker may pass the step of it; of each
    other kind the latest command: an older one is obsolete."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        """Its socket, which reads and closes elsewhere; None: it is not started yet."""
        self._dumps: list[Dump] = []
        self._waiting: dict[type[Command], Command] = {}
        # Of a line that was begun.
        self._rest = b""

    def put(self, command: Command) -> None:
        if isinstance(command, Dump):
            self._dumps.append(command)
        else:
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
        if self._dumps:
            return encode_command(self._dumps.pop(0))
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
