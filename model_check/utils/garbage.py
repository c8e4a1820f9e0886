"""What a program that imports torch need not do: search 170,000 objects that live on for garbage,
and wait at its end for compilers that have nothing to do."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
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
    moment never does (pytorch #189290). Those that they forked would live on for a minute."""
    for compiler in filter(_is_compiler, _children(os.getpid())):
        for pid in [compiler, *_descendants(compiler)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_compiler(pid: int) -> bool:
    try:
        return _COMPILER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that is gone
            found += map(int, children.read_text().split())
    return found
