"""oneDNN multiplies as torch does in float32: values, gradients, any layout, bits that stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_check.models.products import OneDnnLinear, by_onednn, linear, onednn_product, product

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def matrices(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "part of wider rows": lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "one row, repeated": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_product_is_right_for_any_layout_of_its_factors(first: str, second: str) -> None:
    a, b = matrices((10, 16), (16, 24))
    a, b = LAYOUTS[first](a), LAYOUTS[second](b)
    exact = (a.double() @ b.double()).float()
    torch.testing.assert_close(onednn_product(a, b), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 1, 3), (1, 16, 1), (33, 65, 129)])
def test_a_linear_layer_and_its_gradients_are_those_of_torch(sizes: tuple[int, int, int]) -> None:
    time, width, out_width = sizes
    x, weight, out_grad = matrices((2, time, width), (out_width, width), (2, time, out_width))
    found, wanted = (
        (x.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)
    )
    ours, theirs = OneDnnLinear.apply(*found), F.linear(*wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.backward(out_grad)
    theirs.backward(out_grad)
    for mine, its in zip(found, wanted, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=1e-4)


def test_only_gradients_that_are_wanted_are_computed() -> None:
    x, weight = matrices((4, 8), (6, 8))
    OneDnnLinear.apply(x, weight.requires_grad_()).sum().backward()
    assert x.grad is None
    OneDnnLinear.apply(x.requires_grad_(), weight.detach()).sum().backward()
    assert x.grad is not None


def test_the_same_factors_give_the_same_bits_wherever_they_lie() -> None:
    a, b = matrices((65, 688), (688, 256))
    first = onednn_product(a, b)
    shifted = torch.empty(a.numel() + 1)[1:].view(a.shape).copy_(a)  # another alignment
    for again in (a, a.clone(), shifted):
        assert torch.equal(onednn_product(again, b.clone()), first)


def test_what_is_not_finite_stays_so() -> None:
    a, b = matrices((4, 8), (8, 6))
    a[1, 3], a[2, 5] = float("nan"), float("inf")
    finite = onednn_product(a, b).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, False, True]


def test_all_but_float32_on_a_cpu_is_left_to_torch() -> None:
    a, b = matrices((4, 8), (8, 6))
    assert not by_onednn(a.double())
    assert not by_onednn(a.bfloat16())
    assert not by_onednn(a.to("meta"))
    assert torch.equal(product(a.double(), b.double()), a.double() @ b.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(a, b.T).dtype == torch.bfloat16
