"""A model called in another way than by training: without its compiled code, without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from model_check.config.derived import EAGER_CHUNK_ROWS
from model_check.engine.rng import kept_rng
from model_check.models.basic_llama import BasicLlama


def is_compiled(model: BasicLlama) -> bool:
    return model.loss.chunk_loss is not None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Modules are called without their compiled code, which hooks cannot look into, and the head in
    chunks that eager code has memory for."""
    compiled = [module for module in model.modules() if "forward" in vars(module)]
    forwards = [vars(module).pop("forward") for module in compiled]
    head = model.loss if isinstance(model, BasicLlama) else None
    if head is not None:
        kept = head.chunk_loss, head.chunk_rows
        head.chunk_loss, head.chunk_rows = None, min(head.chunk_rows, EAGER_CHUNK_ROWS)
    try:
        yield
    finally:
        for module, forward in zip(compiled, forwards, strict=True):
            vars(module)["forward"] = forward
        if head is not None:
            head.chunk_loss, head.chunk_rows = kept


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards modes and random states as before."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), kept_rng():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
