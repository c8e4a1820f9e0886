"""First weights from `model.init_from`: a checkpoint of ours, or safetensors of transformers."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from model_check.config.architecture import differences
from model_check.config.schema import ModelSettings, Settings
from model_check.data.sources.weights import weights_directory
from model_check.engine.checkpoint import read_checkpoint
from model_check.engine.saving.misfit import misfit
from model_check.errors import ConfigError


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
        _take_checkpoint(model, settings.model, Path(source))
    say(f"weights: taken from {source}")


@torch.no_grad()
def _take_checkpoint(model: nn.Module, settings: ModelSettings, path: Path) -> None:
    saved, own = read_checkpoint(path), model.state_dict()
    problem = misfit(saved["model"], own)
    if problem is not None:
        raise ConfigError(f"model.init_from: {path} does not fit the model: {problem}")
    if other := differences(saved["settings"]["model"], settings):
        raise ConfigError(
            f"model.init_from: {path} holds the weights of another model: "
            f"{', '.join(map(str, other))}; give these settings of [model] the checkpoint's values"
        )
    for name, value in own.items():
        value.copy_(saved["model"][name])
