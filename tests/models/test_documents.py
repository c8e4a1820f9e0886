"""Documents of one row are strangers: together they give what each gives alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model_check.attention import eager, sdpa
from model_check.config.schema import RopeScaling
from model_check.model import Llama, positions_within

Tiny = Callable[..., Llama]
LENGTHS = ((5, 1, 20, 6), (32,), (10, 22))
"""Of the documents in each row of 32 tokens."""


def packed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 257, (len(LENGTHS), 33), generator=generator)
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
    return tokens[:, :-1], tokens[:, 1:], torch.stack(rows)


def gradients(model: Llama, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_positions_begin_again_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 0], [7, 7, 7, 7, 7, 7]])
    expected = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert positions_within(documents).tolist() == expected


@pytest.mark.parametrize("attend", [eager, sdpa])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_every_gradient_are_those_of_the_documents_alone(
    tiny: Tiny, attend: Any, checkpointing: bool
) -> None:
    model = tiny(
        attend,
        init_std=0.2,
        rope_scaling=RopeScaling(original_context_length=8),
        training={"gradient_checkpointing": checkpointing},
    ).double()
    inputs, targets, documents = packed()
    together = model.summed_loss(inputs, targets, documents)
    alone = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        parts = zip(
            torch.split(inputs[row], lengths), torch.split(targets[row], lengths), strict=True
        )
        alone = alone + sum(model.summed_loss(i[None], t[None]) for i, t in parts)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    expected = gradients(model, alone)
    for name, value in gradients(model, model.summed_loss(inputs, targets, documents)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def test_one_document_is_no_mask_at_all(tiny: Tiny) -> None:
    model = tiny(sdpa)
    inputs, targets, documents = packed()
    masked = model.summed_loss(inputs, targets, torch.zeros_like(documents))
    torch.testing.assert_close(masked, model.summed_loss(inputs, targets), rtol=1e-6, atol=0)
