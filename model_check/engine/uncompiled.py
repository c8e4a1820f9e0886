"""A model with compiled code, called without it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

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
