"""Tensors -> the sums that the formula asks for."""

import pytest
import torch
from torch import Tensor

from model_check.forensics.fingerprint import eager_fingerprint, fingerprint_for
from model_check.utils.fingerprint import NUM_COLUMNS, column_weight, flipped, row_weight

MODULUS = 1 << 64


def by_the_formula(tensor: Tensor, first_row: int = 0) -> int:
    """In Python's integers, value by value."""
    width = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    total = 0
    for n, bits in enumerate(tensor.contiguous().view(width).flatten().tolist()):
        row, column = divmod(n, NUM_COLUMNS)
        total += bits * row_weight(first_row + row) * column_weight(column)
    return total % MODULUS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1024,), (1025,), (40, 1000), (2, 3, 700)])
def test_it_is_that_of_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)]
    found = [value % MODULUS for value in eager_fingerprint(tensors, [0, 7]).tolist()]
    assert found == [by_the_formula(tensors[0]), by_the_formula(tensors[1], 7)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex128])
def test_values_of_a_width_that_the_formula_does_not_know_are_refused(dtype: torch.dtype) -> None:
    tensors = [torch.ones(3), torch.ones(5).to(dtype)]
    for kernel in (eager_fingerprint, fingerprint_for(torch.device("cpu"))):
        with pytest.raises(TypeError, match=f"no fingerprint of {dtype}: values of 2, 4 or 8"):
            kernel(tensors)


def test_a_view_counts_as_its_values_in_their_order() -> None:
    x = torch.randn(30, 50)
    both = eager_fingerprint([x.T, x.T.contiguous()]).tolist()
    assert both[0] == both[1]


def test_a_tensor_in_parts_has_the_sum_of_its_parts() -> None:
    x = torch.randn(5000)
    parts = list(x.split(2048))
    assert eager_fingerprint(parts, [0, 2, 4]).sum() == eager_fingerprint([x])[0]


def test_a_flipped_bit_of_a_tensor_is_found() -> None:
    x = torch.randn(300, 400)
    (before,) = eager_fingerprint([x]).tolist()
    x.view(torch.int32).view(-1)[77_777] ^= 1 << 9
    (after,) = eager_fingerprint([x]).tolist()
    assert flipped(before, after, x.numel(), 32) == [(77_777, 9)]
