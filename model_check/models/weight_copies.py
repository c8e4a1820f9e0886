"""Copies of a model's matrices in the type of products, for as long as its weights stay the same:
cast once, where autocast would cast a matrix in each forward pass of compiled code, and the head's
in any. The float32 weights stay the parameters, and get the gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Multiplier(nn.Module):
    """A module that multiplies by a matrix; also as the second base of one."""

    weight_copy: Tensor | None = None
    """Of that matrix, in the type of products; None: there is none. Within `holding_copies` alone,
    and no part of a state dict. Where gradients are on, the matrix gets those of its copy, cast to
    its type: autocast's own cache does the same."""


@contextmanager
def holding_copies(held: Sequence[tuple[Multiplier, Tensor]], dtype: torch.dtype) -> Iterator[None]:
    """Inside, these multiply by copies of these weights as they are now. The copies end with it:
    nothing is kept that a later change of a weight (an update, a checkpoint, a drill) could leave
    behind. Inside, weights must stay."""
    try:
        for module, weight in held:
            module.weight_copy = cast(weight, dtype)
        yield
    finally:
        for module, _ in held:
            module.weight_copy = None


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """One node of autograd, which several backward passes may take: it keeps no tensor."""
    return weight.to(dtype)
