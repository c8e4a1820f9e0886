"""A call that is made again is the same call, whatever it writes."""

import math
import random

import numpy
import torch
from torch import Tensor, nn

from model_check.forensics.fingerprint import fingerprint_for
from model_check.instrument.again import Call, told
from model_check.utils.wire import CALLS_BITS, CALLS_REPEATED

SUMS = fingerprint_for(torch.device("cpu"))


class Restless(nn.Module):
    """Writes whatever a forward pass can write."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.slow = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.slow.requires_grad_(False)
        self.own, self.num_calls, self.seen = random.Random(3), 0, [1.0]
        self.scale = numpy.float64(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9)
        self.num_calls += 1
        self.seen.append(self.own.random() + self.num_calls)
        x = nn.functional.dropout(self.bn(self.fc(x) * self.slow(x)), 0.5)
        return x * sum(self.seen) * self.scale


def test_each_time_it_begins_with_what_it_began_with() -> None:
    module, x = Restless(), torch.randn(8, 4)
    call = Call(module, (x,), {})
    output = module(x)
    again = Call(module, (x,), {})
    torch.randn(3)  # whatever the script draws meanwhile
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = again.made_again(SUMS, until=math.inf)
    assert len(found) == 16
    assert len(found[0]) == 1 + 4  # the output, and the gradients of what is trained
    assert found == found[:1] * 16
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (module.num_calls, len(module.seen)) == (1, 2)
    assert call.made_again(SUMS, until=0.0)[0][0] != int(SUMS([output.detach()]))  # other weights


def test_it_is_made_under_the_autocast_of_the_step() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        call, output = Call(module, (x,), {}), module(x)
    assert output.dtype == torch.bfloat16
    (first, *_) = call.made_again(SUMS, until=math.inf)
    assert first[0] == int(SUMS([output.detach()]))


def test_a_call_that_fails_or_varies_is_told_so() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    class Varies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(factors)

    factors = iter([1.0] * 3 + [1.5] + [1.0] * 60)
    x = torch.randn(2, 4)
    fails, varies = Call(Fails(), (x,), {}), Call(Varies(4, 4), (x,), {})
    assert told([fails], SUMS) == {"calls failed": "RuntimeError: no"}
    first, then = told([varies], SUMS), told([varies], SUMS)
    assert (first[CALLS_REPEATED], then[CALLS_REPEATED]) == (False, True)
    alike = [n for n in (2, 4, 8, 16) if first[f"{CALLS_BITS} {n}"] == then[f"{CALLS_BITS} {n}"]]
    assert alike == [2]


def test_slow_calls_are_made_twice() -> None:
    call = Call(nn.Linear(4, 4), (torch.randn(2, 4),), {})
    assert len(call.made_again(SUMS, until=0.0)) == 2
