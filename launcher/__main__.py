"""`python -m launcher`, and the command `model-check`: the same as `bash run.sh`."""

import gc
import io
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line, and leave the process with its exit code."""
    # USR1 and USR2 are for the workers. Until there is one they wait: by default they would kill.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    # A Ctrl-C during the imports ends the process by the signal, without a traceback. Where the
    # caller ignores it (a job in the background of a script), it stays ignored.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    open_streams()
    gc.disable()  # importing leaves no garbage, and looking for it takes a tenth of the time
    from launcher.cli import main as run_command_line

    gc.freeze()
    gc.enable()
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    code = run_command_line()
    # Everything is written and nobody is left: taking the interpreter apart object by object would
    # only keep the caller waiting (10 ms).
    with suppress(OSError):  # `run_command_line` told of it, or nobody reads it
        sys.stdout.flush()
    os._exit(code)


def open_streams() -> None:
    """Open the standard streams that the caller closed: with `>&-`, this process would get its lock
    and log files as its own output. Escape characters that the terminal's encoding lacks."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Takes the lowest number that is free: this one.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
