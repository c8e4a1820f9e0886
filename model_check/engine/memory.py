"""Out of memory: one line that says what to change; a GPU leaves a snapshot of its allocator."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model_check.config.memory import advice, estimate_memory
from model_check.config.schema import Settings
from model_check.engine.checkpoint import set_earlier_aside
from model_check.engine.run_context import RunContext
from model_check.errors import ModelCheckError
from model_check.events import Evidence
from model_check.utils.held import make_unlinked

SNAPSHOT = "oom_memory.pickle"


class OutOfMemory(ModelCheckError):
    """Model, batch and device do not fit together."""

    exit_code = 1


@contextmanager
def explained(settings: Settings, context: RunContext) -> Iterator[None]:
    """Turn the failure of an allocator into OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The CPU allocator raises no class of its own.
        own_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not own_class and "can't allocate memory" not in str(error):
            raise
        raise _explanation(settings, context, error) from error


def _explanation(settings: Settings, context: RunContext, error: BaseException) -> OutOfMemory:
    # The CPU allocator quotes its source at length; the size follows "DefaultCPUAllocator:".
    words = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
    why = words.splitlines()[0] if words else type(error).__name__
    needed = estimate_memory(settings, context.device.type, context.world.size)
    return OutOfMemory(
        f"out of memory on {context.device}, where this run needs about {needed.describe()}; "
        f"{advice(settings)}. {why}{_snapshot(context)}"
    )


def _snapshot(context: RunContext) -> str:
    """Write what the allocator holds beside the checkpoints; the launcher keeps it in the run
    directory. A snapshot that fails must not hide the error. We have never run it on a GPU."""
    if context.device.type != "cuda":
        return ""
    path = context.directory / SNAPSHOT
    try:
        make_unlinked(path.parent)
        set_earlier_aside(path)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        return f" (no memory snapshot: {error})"
    context.channels.sink.emit(Evidence(path=str(path.absolute()), what="memory snapshot"))
    return f" Memory snapshot: {path} (open it at pytorch.org/memory_viz)"
