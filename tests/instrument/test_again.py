"""Calls that are made again, in one process."""

import pytest
import torch
from torch import Tensor, nn

from model_check.forensics.fingerprint import fingerprint_for
from model_check.instrument import again
from model_check.instrument.again import Call, told
from model_check.utils.wire import CALLS_BITS

SUMS = fingerprint_for(torch.device("cpu"))


def test_it_is_made_under_the_autocast_of_the_step() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        call, output = Call(module, (x,), {}), module(x)
    assert output.dtype == torch.bfloat16
    found = call.make(SUMS)
    assert found[0] == int(SUMS([output.detach()]))
    assert len(found) == 1 + 2  # and the gradients of weight and bias


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_LONG_ENOUGH_S", 1e9)


def test_one_time_that_differs_shows_from_there_on() -> None:
    class Varies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(factors)

    factors = iter([1.0] * 3 + [1.5] + [1.0] * 60)
    call = Call(Varies(4, 4), (torch.randn(2, 4),), {})
    first, then = told([call], SUMS), told([call], SUMS)
    assert list(first) == list(then) == [f"{CALLS_BITS} {times}" for times in (2, 4, 8, 16)]
    assert [key for key in first if first[key] == then[key]] == [f"{CALLS_BITS} 2"]


def test_a_call_that_fails_is_told_with_what_was_made_before() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if next(numbers) == 5:
                raise SystemExit("enough")
            return x

    numbers = iter(range(9))
    found = told([Call(Fails(), (torch.ones(2),), {})], SUMS)
    assert list(found) == [f"{CALLS_BITS} 2", f"{CALLS_BITS} 4", "calls failed"]
    assert found["calls failed"] == "SystemExit: enough"


def test_slow_calls_are_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_LONG_ENOUGH_S", 0.0)
    assert list(told([Call(nn.Linear(4, 4), (torch.ones(1, 4),), {})], SUMS)) == [f"{CALLS_BITS} 2"]
