"""`python -m launcher`: the same as `bash run.sh`."""

import gc
import io
import os
import signal
import sys
from contextlib import suppress


def open_streams() -> None:
    """Started with `>&-`, this process would open its lock and log files as its own output. What a
    terminal's encoding has no characters for is escaped."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    # What a run passes on to its workers waits until there is one: by default it would kill.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    # A Ctrl-C while the rest is imported ends the process as one, without a traceback. Ignored (a
    # job in the background of a script), it stays so.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    open_streams()
    gc.disable()  # importing leaves no garbage, and looking for it takes a tenth of the time
    from launcher.cli import main

    gc.freeze()
    gc.enable()
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    # Everything is written and nobody is left: taking the interpreter apart object by object would
    # only keep the caller waiting (10 ms).
    code = main()
    with suppress(OSError):  # told by `main`, or nobody reads it
        sys.stdout.flush()
    os._exit(code)
