"""Events as lines of JSON, and the commands that come back, without msgspec: the command's own
Python need not have it."""

import json
import os
import select
import socket
import time
from typing import Any

_READ_BYTES = 1 << 16


class PlainSink:
    """The worker's end of the socket. When the supervisor is gone, events are dropped."""

    def __init__(self, fd: int) -> None:
        self._socket: socket.socket | None = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._rest = b""

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def emit(self, kind: str, **fields: Any) -> None:
        if self._socket is None:
            return
        line = json.dumps({"kind": kind, "t": time.monotonic_ns(), **fields})
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            self._socket = None

    def commands(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """What the supervisor said, after at most `wait_s`."""
        if self._socket is None:
            return []
        if wait_s and not select.select([self._socket], [], [], wait_s)[0]:
            return []
        try:
            read = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            read = b""
        if not read:
            self._socket = None
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [json.loads(line) for line in lines]

    def keep_from_children(self) -> None:
        """A child of the worker (a loader of data) is not the worker."""
        if self._socket is not None:
            os.set_inheritable(self._socket.fileno(), False)

    def forget(self) -> None:
        """Leave the socket to whoever else has it."""
        if self._socket is not None:
            self._socket.detach()
            self._socket = None
