"""What of a tensor this rank has: of one that is sharded its rows, of any other all."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from model_check.engine.sharded.sums import Part
from model_check.forensics.shard import first_of, is_shared, own_values


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """The values that this rank has of another tensor, placed as those of `tensor` are."""
    if not is_shared(tensor):
        return values
    shared: Any = tensor
    placed: Tensor = type(shared)(values, shared._spec, requires_grad=False)
    return placed


class Place(NamedTuple):
    """Of a part in the whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def place_of(tensor: Tensor) -> Place:
    """Ranks share rows."""
    sizes, (rows, *others) = tuple(own_values(tensor).shape), tensor.shape
    first_row = first_of(tensor) // math.prod(others) if rows else 0
    return Place((first_row, *(0 for _ in others)), sizes)


def part_of(tensor: Tensor) -> Part:
    """With its place among the values of the whole tensor."""
    return Part(own_values(tensor), first_of(tensor))


def first_value(offsets: tuple[int, ...] | list[int], shape: tuple[int, ...] | list[int]) -> int:
    """The place of a part's first value, for parts of whole rows."""
    return offsets[0] * math.prod(shape[1:]) if offsets else 0


def mesh_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The name of each dimension of their device mesh -> its size."""
    for tensor in tensors.values():
        if is_shared(tensor):
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            names = mesh.mesh_dim_names or [f"dim{number}" for number in range(mesh.ndim)]
            return dict(zip(names, mesh.shape, strict=True))
    return {}
