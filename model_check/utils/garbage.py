"""Python's search for garbage, in a program that imports torch: 170,000 objects that live on."""

import gc
import sys
from typing import NoReturn


def keep_imports() -> None:
    """What was imported is never searched for garbage again. Call it once the imports are done,
    which ran under gc.disable()."""
    gc.freeze()
    gc.enable()


def leave(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, but without a search for garbage: 0.5 s of CPU where torch
    is imported, and the process takes its garbage with it."""
    gc.freeze()
    gc.disable()
    sys.exit(exit_code)
