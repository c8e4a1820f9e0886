"""The chunked head equals the plain one, whatever the chunk, and keeps a float32 loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_check.config.derived import loss_chunk_rows
from model_check.config.schema import Settings, TrainingSettings
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
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets, 2048).detach())


def test_under_autocast_products_are_bfloat16_and_the_loss_float32() -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = linear_cross_entropy(hidden, weight, targets, 2048)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 2048)
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_logits_of_all_rows_never_exist_at_once() -> None:
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(100, 8, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64)
    with _Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, chunk_rows=10).backward()
    assert largest.numel == max(10 * 100, weight.numel())


def test_rows_without_a_target_give_no_gradient_and_hide_no_other() -> None:
    hidden, weight, targets = inputs()
    linear_cross_entropy(hidden, weight, targets, 4).backward()
    assert hidden.grad is not None
    silent = (hidden.grad == 0).all(dim=1)
    assert silent.nonzero().flatten().tolist() == [2, 9]


def test_a_batch_of_ignored_targets_has_loss_and_gradients_zero() -> None:
    hidden, weight, _ = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full((10,), IGNORED), 4)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("chunk", "vocab_size", "device", "rows"),
    [
        (None, 128256, "cuda", 2048),
        (None, 8192, "cpu", 256),
        (None, 128256, "cpu", 128),
        (None, 31, "cpu", 2048),
        (77, 8192, "cpu", 77),
    ],
)
def test_chunks_follow_the_device_unless_they_are_set(
    chunk: int | None, vocab_size: int, device: str, rows: int
) -> None:
    settings = Settings(training=TrainingSettings(loss_chunk_rows=chunk))
    assert loss_chunk_rows(settings, vocab_size, device) == rows


@pytest.mark.parametrize("label", [-1, -99, 23])
def test_a_label_that_is_no_token_is_refused(label: int) -> None:
    hidden, weight, targets = inputs()
    targets[4] = label
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        linear_cross_entropy(hidden, weight, targets, 2048)
