"""What a program that imports torch need not do: search 170,000 objects that live on for garbage,
and wait at its end for compilers that have nothing to do."""

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_COMPILER = b"torch/_inductor/compile_worker"
"""In the command line of the process in which torch compiles."""


def keep_imports() -> None:
    """What was imported is never searched for garbage again. Call it once the imports are done,
    which ran under gc.disable()."""
    gc.freeze()
    gc.enable()


def leave(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, but without a search for garbage: 0.5 s of CPU where torch
    is imported, and the process takes its garbage with it; and without torch's compilers."""
    gc.freeze()
    gc.disable()
    _end_compilers()
    sys.exit(exit_code)


def _end_compilers() -> None:
    """torch waits up to 300 s at the end until its compilers end, and one that was forked at a bad
    moment never does (pytorch #189290)."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread, or a child, that is gone
            for pid in children.read_text().split():
                if _COMPILER in Path("/proc", pid, "cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
