"""The standard streams of a program of ours: there from the start, and written to in one place, so
each program ends in the same way where its reader is gone or its disk is full."""

import os
import sys
from typing import TextIO

from model_check.errors import StorageError
from model_check.utils.words import printable_lines


def open_missing_streams() -> None:
    """Open /dev/null in the place of each closed stream (`2>&-`). Otherwise the next file that is
    opened would get its number: what a library writes to standard error would end in a
    checkpoint."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is `fd`
            os.set_inheritable(fd, True)
    sys.stdin = sys.stdin or os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def put(text: str, end: str = "\n") -> None:
    """Print to standard output, at once, as it is. Raises BrokenPipeError; StorageError where its
    disk is full."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _abandon(sys.stdout)
        raise
    except OSError as error:
        _abandon(sys.stdout)
        raise StorageError(f"standard output: {error.strerror}") from error


def complain(text: str) -> None:
    """Print to standard error. Where nobody can read it, the exit code still tells."""
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: TextIO) -> None:
    """Python flushes it once more at its end, and a second failure would change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
