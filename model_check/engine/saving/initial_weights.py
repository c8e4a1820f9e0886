"""First weights from `model.init_from`: a checkpoint of ours, or safetensors of transformers."""

from pathlib import Path

from torch import nn

from model_check.config.resume import differences, full
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import Group, parameter
from model_check.engine.checkpoint import read_checkpoint, shapes
from model_check.engine.run_context import RunContext
from model_check.errors import ConfigError
from model_check.forensics.scan import bad_parameters
from model_check.models.mismatch import mismatch
from model_check.utils.words import few


def take_initial_weights(model: nn.Module, settings: Settings, context: RunContext) -> None:
    """Overwrite the weights of `model` with those of `context.weights`, or else of the checkpoint
    that model.init_from names; the optimizer, the schedule and the data start afresh.

    Raises ConfigError or CheckpointError for what does not fit, or cannot be read.
    """
    source = settings.model.init_from
    if source is None:
        return
    if context.weights is not None:
        from model_check.models.hf_import import load_weights  # safetensors, for these runs alone

        load_weights(model, settings.model, context.weights)
    else:
        _take_checkpoint(model, settings.model, Path(source))
    if spoilt := [tensor.name for tensor in bad_parameters(model)]:
        raise ConfigError(f"model.init_from: {source}: weights not finite: {few(spoilt)}")
    context.channels.say(f"weights: taken from {source}")


def _take_checkpoint(model: nn.Module, settings: ModelSettings, path: Path) -> None:
    saved = read_checkpoint(path)
    own = model.state_dict()
    if saved["settings"]["model"].get("attention", "full") == "full":
        settings = full(settings)
        own = {n: value for n, value in own.items() if parameter(n).group is not Group.GATE}
    problem = mismatch(shapes(saved["model"]), shapes(own))
    if problem is not None:
        raise ConfigError(f"model.init_from: {path} does not fit the model: {problem}")
    if other := differences(saved["settings"]["model"], settings):
        raise ConfigError(
            f"model.init_from: {path} holds the weights of another model: "
            f"{', '.join(map(str, other))}; give these settings of [model] the checkpoint's values"
        )
    model.load_state_dict(saved["model"], strict=False)  # but for gates, the same names
