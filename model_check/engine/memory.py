"""Out of memory, told in one line with what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model_check.config.schema import TrainingSettings
from model_check.errors import ModelCheckError


class OutOfMemory(ModelCheckError):
    """Model, batch and device do not fit together."""

    exit_code = 1


@contextmanager
def explained(training: TrainingSettings, device: torch.device) -> Iterator[None]:
    """Turn an allocator's failure inside into OutOfMemory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(_advice(training, device, error)) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the CPU allocator has no class of its own
            raise
        raise OutOfMemory(_advice(training, device, error)) from error


def _advice(training: TrainingSettings, device: torch.device, error: BaseException) -> str:
    # The CPU allocator quotes its own source at length; the size stands behind "DefaultCPU".
    words = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
    why = words.splitlines()[0] if words else type(error).__name__
    checkpointing = (
        "" if training.gradient_checkpointing else ", or set training.gradient_checkpointing=true"
    )
    return (
        f"out of memory on {device}: lower training.batch_size ({training.batch_size}) or "
        f"training.context_length ({training.context_length}){checkpointing}, or train fewer "
        f"model.num_layers. {why}"
    )
