"""Checkpoint files: what is in them, where they lie. They appear whole or not at all."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from model_check.config.schema import Settings
from model_check.engine.optim import AdamW
from model_check.errors import StorageError
from model_check.utils.files import replacing

SCHEMA = 1


def checkpoint_directory(parent: str, supervised: bool, worker: str) -> Path:
    """`parent` for a worker that was started by hand, else a directory of its own: launchers that
    run side by side, with a GPU each, share no path either."""
    directory = Path(parent)
    return directory / worker.lower() if supervised else directory


def save_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: AdamW,
    settings: Settings,
    step: int,
    loader_position: int,
    loss: float | None,
) -> None:
    """Everything that training needs to go on with step `step`, as tensors and plain types (loads
    with weights_only=True).

    `loader_position`: batches consumed. Raises StorageError; an older file of that name then stays.
    """
    state = {
        "schema": SCHEMA,
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "settings": msgspec.to_builtins(settings),
        "rng": _rng_states(),
        "loader": {"position": loader_position},
        "loss": loss,
    }
    with storing(path), replacing(path) as beside:
        torch.save(state, beside)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into StorageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save has no class of its own for a full disk
        raise StorageError(
            f"{path}: cannot be written: {str(error).splitlines()[0]}; free space there, or set "
            "system.checkpoint_dir"
        ) from error


def _rng_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": [version, list(internal), gauss],
        "numpy": numpy_state | {"state": {"key": keys, "pos": numpy_state["state"]["pos"]}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if on_gpu else [],
    }
