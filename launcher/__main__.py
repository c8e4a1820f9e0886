"""`python -m launcher`, and the command `model-check`: the same as `bash run.sh`."""

import gc
import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from model_check.utils.standard_streams import open_missing_streams


def main() -> NoReturn:
    """Run the command line, and leave the process with its exit code."""
    # USR1 and USR2 are for the workers. Until there is one they wait: by default they would kill.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    if os.getpid() == 1:
        # The kernel drops a signal to the first process of a container which nobody handles yet. A
        # blocked one waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    mask = None
    if may_be_of_a_job(os.environ):
        # It would end us before the other nodes know of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    # A Ctrl-C during the imports ends the process by the signal, without a traceback. Where the
    # caller ignores it (a job in the background of a script), it stays ignored.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks
    gc.disable()  # importing leaves no garbage, and looking for it takes a tenth of the time
    import_msgspec()
    from launcher.cli import main as run_command_line

    gc.freeze()
    gc.enable()
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    code = run_command_line(mask=mask)
    # Everything is written and nobody is left: taking the interpreter apart object by object would
    # only keep the caller waiting (10 ms).
    with suppress(OSError):  # `run_command_line` told of it, or nobody reads it
        sys.stdout.flush()
    os._exit(code)


def import_msgspec() -> None:
    """Without typing_extensions, of which it takes what typing has, too: 8 ms less."""
    is_there = "typing_extensions" in sys.modules
    if not is_there:
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    import msgspec.structs  # noqa: F401

    if not is_there:
        del sys.modules["typing_extensions"]


def may_be_of_a_job(environ: Mapping[str, str]) -> bool:
    """On one of several nodes; `Absence.guess` looks closer."""
    return environ.get("SLURM_STEP_NUM_NODES", "1") != "1"


if __name__ == "__main__":
    main()
