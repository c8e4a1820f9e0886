"""What one worker is still to be told: never more than it can use, and nobody waits for it."""

import os

from launcher.output.streams import Stream
from model_check.events import Command, Dump, encode_command, slot_of


class Outbox:
    """The latest command of each slot: an older one is obsolete."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        """Its socket, which reads and closes elsewhere; None: it is not started yet."""
        self._waiting: dict[tuple[type[Command], int | None], Command] = {}
        # Of a line that was begun.
        self._rest = b""

    def put(self, command: Command) -> None:
        self._waiting[slot_of(command)] = command

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
        # With credit a worker may pass the step after which it is to keep its state.
        slot = min(self._waiting, key=lambda slot: slot[0] is not Dump)
        return encode_command(self._waiting.pop(slot))

    def _write(self, line: bytes) -> int:
        assert self.stream is not None
        if self.stream.fd is None:
            return len(line)
        try:
            return os.write(self.stream.fd, line)
        except (BrokenPipeError, ConnectionResetError):
            return len(line)
