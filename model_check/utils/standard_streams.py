"""Standard streams of a process that was started with some of them closed (`2>&-`)."""

import os
import sys


def open_missing_streams() -> None:
    """Open /dev/null in the place of each closed stream. Otherwise the next file that is opened
    would get its number: what a library writes to standard error would end in a checkpoint."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is `fd`
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
