"""Weights of a model whose vocabulary grows."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from model_check.config.shape import EMBEDDING, HEAD

BY_TOKEN = (EMBEDDING.name, HEAD.name)
"""The matrices with a row a token."""


def with_rows(weight_VE: Tensor, num_rows: int) -> Tensor:
    """[num_rows, E]: those of `weight`, and for each further token their mean: its score is then at
    most that of a token that is there, so no sequence becomes much less likely (Hewitt,
    Initializing New Word Embeddings for Pretrained Language Models, 2021). As it is where it has
    that many rows, or more."""
    num_new = num_rows - len(weight_VE)
    if num_new <= 0:
        return weight_VE
    mean_E = weight_VE.double().mean(dim=0).to(weight_VE.dtype)
    return torch.cat([weight_VE, mean_E.expand(num_new, -1)])


def grown(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` with as many rows as the model's `own` where they have fewer."""
    return {
        name: with_rows(weight, len(own[name])) if _has_fewer_rows(name, weight, own) else weight
        for name, weight in weights.items()
    }


def _has_fewer_rows(name: str, weight: Tensor, own: Mapping[str, Tensor]) -> bool:
    return name in BY_TOKEN and name in own and lacks_rows(weight.shape, len(own[name]))


def lacks_rows(shape: Sequence[int], num_rows: int) -> bool:
    """Whether a matrix of this shape can grow to so many rows."""
    return len(shape) == 2 and 0 < shape[0] < num_rows


def growth(num_before: int, num_now: int) -> str | None:
    """A line for people; None: it does not grow."""
    if num_now <= num_before:
        return None
    num_new = num_now - num_before
    return (
        f"weights: {num_new:,} new token{'s'[: num_new > 1]} beside {num_before:,}: each begins as "
        "the mean of the others"
    )
