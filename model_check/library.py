"""For programs of your own: the model that a checkpoint holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from model_check.attention import sdpa
from model_check.config.shape import geometry
from model_check.engine.checkpoint import not_ours, read_checkpoint, settings_of
from model_check.init import empty_model
from model_check.model import Llama


def load_model(checkpoint: str | Path, device: str = "cpu") -> Llama:
    """The model of `last.pt`, `step_N.pt`, a sharded `step_N`, ..., in float32 on `device`, in
    evaluation mode; `model(tokens)` takes int64 [B, T] and gives [B, T, V].

    Raises CheckpointError for what is no checkpoint of ours, ConfigError for one of another
    version.
    """
    path = Path(checkpoint)
    return model_of(read_checkpoint(path), path, torch.device(device))


def model_of(state: Mapping[str, Any], path: Path, device: torch.device) -> Llama:
    """The same of a checkpoint that was read from `path`. Raises as `load_model`."""
    settings = settings_of(state, path)
    shape = geometry(settings.model, len(state["model"]["tok_embed.weight"]))
    model = empty_model(settings, shape, sdpa, device)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise not_ours(path, "its weights are not those of its settings") from error
    return model.eval()
