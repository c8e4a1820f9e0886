"""The evidence of a non-finite step that fits a dossier: what is known, as JSON, and the tensors
around the fault, as safetensors, up to a size."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from model_check.events import NonFinite
from model_check.utils.files import write_atomic

LARGEST_BYTES = 256 << 20
"""Of the tensors. What exceeds it is left out and named in the JSON."""


def write_finding(event: NonFinite, tensors: Mapping[str, Tensor], path: Path) -> None:
    """The event, which tensors lie beside it, and which were too large. Raises OSError."""
    fitting = {name for name, _ in _fitting(tensors)}
    document: dict[str, Any] = {
        "schema": 1,
        **msgspec.to_builtins(event),
        "tensors": sorted(fitting),
        "left_out": sorted(tensors.keys() - fitting),
    }
    write_atomic(path, json.dumps(document, indent=2) + "\n")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Those that fit, first come, first served. Raises OSError."""
    from safetensors.torch import save  # for an alarm alone

    # Each with memory of its own: the format refuses what is shared.
    kept = {name: tensor.detach().cpu().clone() for name, tensor in _fitting(tensors)}
    write_atomic(path, save({name: tensor.contiguous() for name, tensor in kept.items()}))


def own_weights(model: nn.Module, module: str) -> dict[str, Tensor]:
    """The weights of a module itself, without those of the modules in it."""
    modules = dict(model.named_modules())
    own = modules[module].named_parameters(recurse=False) if module in modules else ()
    return {name: parameter.detach() for name, parameter in own}


def _fitting(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    room = LARGEST_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes <= room:
            room -= tensor.nbytes
            yield name, tensor
