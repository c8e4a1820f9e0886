"""What of a tensor this rank has: of one that is sharded its rows, of any other all."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from model_check.engine.sharded.sums import Part
from model_check.forensics.shard import first_of, is_shared, own_values


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Returns `values`, this rank's shard of another tensor of the same shape, as a DTensor that is
    placed as `tensor` and shares their memory; `values` itself where `tensor` is not sharded."""
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
    """Returns where this rank's rows lie in `tensor`, of any shape but a scalar's: the offset and
    the size in each dimension. Raises ValueError for a scalar."""
    sizes, (rows, *others) = tuple(own_values(tensor).shape), tensor.shape
    first_row = first_of(tensor) // math.prod(others) if rows else 0
    return Place((first_row, *(0 for _ in others)), sizes)


def part_of(tensor: Tensor) -> Part:
    """Returns this rank's values of `tensor` (any shape), the live ones, with the place of the
    first in the whole."""
    return Part(own_values(tensor), first_of(tensor))


def first_value(offsets: tuple[int, ...] | list[int], shape: tuple[int, ...] | list[int]) -> int:
    """The place of a part's first value, for parts of whole rows."""
    return offsets[0] * math.prod(shape[1:]) if offsets else 0


def mesh_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the name of each dimension of their device mesh -> its size, by the first sharded
    tensor, whatever its shape; empty where none is sharded."""
    for tensor in tensors.values():
        if is_shared(tensor):
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            names = mesh.mesh_dim_names or [f"dim{number}" for number in range(mesh.ndim)]
            return dict(zip(names, mesh.shape, strict=True))
    return {}
