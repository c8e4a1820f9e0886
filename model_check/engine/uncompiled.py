"""A model called in another way than by training: without its compiled code, without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from model_check.engine.rng import kept_rng

COMPILED = ("forward", "of_chunk")
"""Methods for which compiled code stands in."""


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Modules are called without their compiled code, which hooks cannot look into, and the head in
    chunks that eager code has memory for."""
    compiled = [
        (vars(module), name, vars(module).pop(name))
        for module in model.modules()
        for name in COMPILED
        if name in vars(module)
    ]
    try:
        yield
    finally:
        for values, name, code in compiled:
            values[name] = code


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
