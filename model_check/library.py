"""For programs of your own: the model that a checkpoint holds."""

from pathlib import Path

import torch

from model_check.config.shape import geometry
from model_check.engine.checkpoint import not_ours, read_checkpoint, settings_of
from model_check.models.attention import BACKENDS
from model_check.models.backends import resolve_backend
from model_check.models.basic_llama import BasicLlama
from model_check.models.build_model import build_model


def load_model(checkpoint: str | Path, device: str = "cpu") -> BasicLlama:
    """The model of `last.pt`, `step_N.pt`, ..., in float32 on `device`, in evaluation mode;
    `model.logits(tokens)` takes int64 [B, T] and gives [B, T, V].

    Raises CheckpointError for what is no checkpoint of ours, ConfigError for one of another
    version or an attention backend that cannot act here.
    """
    path = Path(checkpoint)
    state = read_checkpoint(path)
    settings, place = settings_of(state, path), torch.device(device)
    backend, _ = resolve_backend(
        "auto", place, torch.float32, documents=settings.data.document_masking
    )
    vocab_size = len(state["model"]["tok_embed.weight"])
    model = build_model(settings, geometry(settings.model, vocab_size), BACKENDS[backend], place)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise not_ours(path, "its weights are not those of its settings") from error
    return model.eval()
