"""The chunked head equals the plain one, whatever the chunk, and keeps a float32 loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_check.models.loss import IGNORED, linear_cross_entropy


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(10, 8, dtype=dtype, generator=generator)
    weight = torch.randn(23, 8, dtype=dtype, generator=generator)
    targets = torch.randint(0, 23, (10,), generator=generator)
    targets[[2, 9]] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 2048])
def test_loss_and_gradients_equal_those_of_the_plain_head(chunk_rows: int) -> None:
    hidden, weight, targets = inputs()
    ours = linear_cross_entropy(hidden, weight, targets, chunk_rows) / 8
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(plain, (hidden, weight))
    for gradient, theirs in zip(torch.autograd.grad(ours, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-15)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets).detach())


def test_under_autocast_products_are_bfloat16_and_the_loss_float32() -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = linear_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
