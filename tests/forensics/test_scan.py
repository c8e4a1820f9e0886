"""Counting NaN and Inf."""

import torch
from torch import nn

from model_check.forensics.scan import BadTensor, bad_gradients, bad_parameters, bad_tensors

NAN, INF = float("nan"), float("inf")


def test_only_bad_tensors_are_found_in_order_with_their_counts() -> None:
    tensors = [
        ("fine", torch.ones(3)),
        ("nan", torch.tensor([[1.0, NAN], [NAN, 2.0], [3.0, 4.0]])),
        ("inf", torch.tensor([INF, -INF, NAN])),
    ]
    nan, inf = bad_tensors(tensors)
    assert (nan.name, nan.shape, nan.num_nan, nan.num_inf, nan.numel) == ("nan", (3, 2), 2, 0, 6)
    assert repr(nan.first_values) == "(1.0, nan, nan, 2.0, 3.0)"
    assert (inf.num_nan, inf.num_inf, inf.numel) == (1, 2, 3)


def test_bfloat16_is_counted_as_it_is() -> None:
    (bad,) = bad_tensors([("x", torch.tensor([1.0, INF], dtype=torch.bfloat16))])
    assert bad == BadTensor("x", (2,), 0, 1, (1.0, INF), (1,), (1.0, 1.0), norm=1.0)


def test_gradients_and_parameters_of_a_model() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.tensor([[NAN, 0.0], [0.0, 0.0]])
    assert [bad.name for bad in bad_gradients(model)] == ["weight"]
    assert bad_parameters(model) == []
    with torch.no_grad():
        model.bias[1] = INF
    assert [bad.name for bad in bad_parameters(model)] == ["bias"]


def test_a_sum_that_overflows_is_no_reason_to_accuse_a_tensor() -> None:
    assert bad_tensors([("a", torch.full((8,), 3e38)), ("b", torch.zeros(0))]) == []
    mixed = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert [tensor.name for tensor in bad_tensors([("c", mixed)])] == ["c"]
