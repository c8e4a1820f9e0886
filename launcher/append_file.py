"""A file that grows byte for byte, and whose disk may fail without anybody else noticing."""

import os
from collections.abc import Callable
from pathlib import Path


class AppendFile:
    """Unbuffered appends. A full or vanished disk is told once through `say` and never raised:
    losing a log is no reason to lose a run."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._lost_bytes = 0
        self._fd: int | None = None
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            # O_NONBLOCK is without effect on a regular file; a FIFO without a reader is refused.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            say(f"cannot open {path}: {error.strerror}; the run goes on without this file")

    def write(self, data: bytes) -> None:
        """Append all of `data`, or as much as the disk takes; later writes are tried again."""
        if self._fd is None:
            return
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            if self._lost_bytes == 0:
                self._say(f"cannot write {self._path}: {error.strerror}; the run goes on")
            self._lost_bytes += len(data) - written

    def close(self) -> None:
        """Close it, and tell how much it misses."""
        if self._fd is None:
            return
        deleted = os.fstat(self._fd)
        if deleted.st_nlink == 0:
            self._say(f"{self._path} was deleted during the run: {deleted.st_size} bytes are lost")
        os.close(self._fd)
        self._fd = None
        if self._lost_bytes:
            self._say(f"{self._path} misses {self._lost_bytes} bytes that the disk did not take")
