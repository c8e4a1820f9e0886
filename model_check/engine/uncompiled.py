"""A model with compiled code, called without it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from model_check.models.basic_llama import BasicLlama


def is_compiled(model: BasicLlama) -> bool:
    return model.loss.chunk_loss is not None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Modules are called without their compiled code, which hooks cannot look into."""
    compiled = [module for module in model.modules() if "forward" in vars(module)]
    forwards = [vars(module).pop("forward") for module in compiled]
    loss = model.loss if isinstance(model, BasicLlama) else None
    chunk_loss = loss and loss.chunk_loss
    if loss is not None:
        loss.chunk_loss = None
    try:
        yield
    finally:
        for module, forward in zip(compiled, forwards, strict=True):
            vars(module)["forward"] = forward
        if loss is not None:
            loss.chunk_loss = chunk_loss
