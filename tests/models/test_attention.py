"""Every backend equals the definition."""

import pytest
import torch
from torch import Tensor

from model_check.attention import attend_cached, backend, eager


def inputs(num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 33, 16), (2, num_kv_heads, 33, 16), (2, num_kv_heads, 33, 16)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_sdpa_equals_eager_in_values_and_gradients(num_kv_heads: int) -> None:
    q, k, v = inputs(num_kv_heads)
    weights = torch.randn(2, 4, 33, 16, dtype=torch.float64)
    results = [
        (out, *torch.autograd.grad((out * weights).sum(), (q, k, v)))
        for out in (backend(name)(q, k, v, None) for name in ("eager", "sdpa"))
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_later_token_changes_nothing_before_it(name: str) -> None:
    q, k, v = (x.detach() for x in inputs(2))
    before = backend(name)(q, k, v, None)
    for x in (q, k, v):
        x[:, :, 20:] += 1.0
    after = backend(name)(q, k, v, None)
    torch.testing.assert_close(after[:, :, :20], before[:, :, :20], rtol=0, atol=1e-12)
    assert not torch.equal(after[:, :, 20:], before[:, :, 20:])


@pytest.mark.parametrize("num_new", [1, 2, 20, 33])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_last_positions_alone_read_what_they_read_among_all(
    num_kv_heads: int, num_new: int
) -> None:
    q, k, v = (x.detach() for x in inputs(num_kv_heads))
    whole = eager(q, k, v)[:, :, -num_new:]
    torch.testing.assert_close(attend_cached(q[:, :, -num_new:], k, v), whole, rtol=0, atol=1e-12)


def test_eager_attends_to_itself_at_the_first_position() -> None:
    q, k, v = (x.detach() for x in inputs(4))
    assert torch.equal(eager(q, k, v)[:, :, 0], v[:, :, 0])
