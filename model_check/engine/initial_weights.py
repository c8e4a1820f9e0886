"""First weights from `model.init_from`: a checkpoint of ours, or safetensors of transformers."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from model_check.config.schema import Settings
from model_check.data.weights import weights_directory
from model_check.engine.checkpoint import read_checkpoint
from model_check.errors import ConfigError

_SHOWN = 4


def take_initial_weights(model: nn.Module, settings: Settings, say: Callable[[str], None]) -> None:
    """Overwrite the weights of `model`. Raises ConfigError or DataError when what is named cannot
    be had or does not fit; the optimizer, the schedule and the data start afresh."""
    source = settings.model.init_from
    if source is None:
        return
    directory = weights_directory(settings, say)
    if directory is not None:
        from model_check.models.hf_import import load_weights  # safetensors, for these runs alone

        load_weights(model, settings.model, directory)
    else:
        _take_checkpoint(model, Path(source))
    say(f"weights: taken from {source}")


@torch.no_grad()
def _take_checkpoint(model: nn.Module, path: Path) -> None:
    saved = read_checkpoint(path)["model"]
    own = model.state_dict()
    problems = list(own.keys() ^ saved.keys())
    problems += [
        f"{name} {list(saved[name].shape)}, the model's is {list(value.shape)}"
        for name, value in own.items()
        if name in saved and saved[name].shape != value.shape
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"model.init_from: {path} does not fit the model: "
            f"{', '.join(sorted(problems)[:_SHOWN])}{more}"
        )
    for name, value in own.items():
        value.copy_(saved[name])
