"""A file that grows byte for byte, and whose disk may fail without harm to the run."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from launcher.run_dir import opened
from model_check.errors import StorageError
from model_check.utils.held import OTHERS_WRITE

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK is without effect on a regular file; a FIFO without a reader is refused."""


class AppendFile:
    """Unbuffered appends. `say` is told once of a full or vanished disk; nothing is raised: losing
    a log is no reason to lose a run."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._lost_bytes = 0
        self._fd: int | None = None
        try:
            self._fd = _open(path)
        except (OSError, StorageError) as error:
            why = getattr(error, "strerror", None) or error
            say(f"cannot open {path}: {why}; the run goes on without this file")

    def write(self, data: bytes) -> None:
        """Append all of `data`, or as much as the disk takes; a later write tries again."""
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
        """Close it, and say how many bytes it lacks."""
        if self._fd is None:
            return
        deleted = os.fstat(self._fd)
        if deleted.st_nlink == 0:
            self._say(f"{self._path} was deleted during the run: {deleted.st_size} bytes are lost")
        os.close(self._fd)
        self._fd = None
        if self._lost_bytes:
            self._say(f"{self._path} misses {self._lost_bytes} bytes that the disk did not take")


def _open(path: Path) -> int:
    """Open or make it. Raises OSError: another user, who may write to its directory, may have put
    a file, a link or a pipe there."""
    with opened(path.parent) as directory:
        fd = os.open(path.name, _FLAGS, 0o666, dir_fd=directory.descriptor)
        status, may_be_planted = os.fstat(fd), directory.status().st_mode & OTHERS_WRITE
    is_ours = status.st_uid == os.geteuid() and status.st_nlink == 1
    if may_be_planted and (stat.S_ISFIFO(status.st_mode) or not is_ours):
        os.close(fd)
        raise OSError(errno.EPERM, "another user may have made it")
    return fd
