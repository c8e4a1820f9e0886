"""What is found of models and optimizers, in one process."""

import gc
import weakref
from collections.abc import Iterator, Set

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from model_check.forensics.checksums import index_of_all
from model_check.forensics.fingerprint import fingerprint_for
from model_check.instrument import names
from model_check.instrument.build import described
from model_check.instrument.names import Roots
from model_check.instrument.update import WatchedUpdate

REGISTRATIONS = (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


@pytest.fixture
def roots() -> Iterator[Roots]:
    """Told of what modules get, as the hooks of the start do it."""
    roots = Roots()
    hooks = [register(lambda *given: roots.see_part(given[2])) for register in REGISTRATIONS]
    yield roots
    for hook in hooks:
        hook.remove()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Set[int]]:
    """Through the whole process, so far."""
    real, made = names._search, []

    def search(ids: Set[int]) -> list[nn.Module]:
        made.append(ids)
        return real(ids)

    monkeypatch.setattr(names, "_search", search)
    return made


def outer(roots: Roots, *nets: nn.Module) -> list[list[nn.Module]]:
    return [[root.outer for root in roots.of(net.parameters())] for net in nets]


def test_of_very_many_optimizers_not_each_one_searches_the_process(
    roots: Roots, searches: list[Set[int]]
) -> None:
    nets = [nn.Linear(2, 2) for _ in range(names.MOST_SEARCHES + 4)]
    both = nn.ModuleList(nets)
    assert outer(roots, *nets) == [[both]] * len(nets)
    assert len(searches) == 1
    new = nn.Linear(2, 2)
    assert outer(roots, new) == [[new]]
    alone = [nn.Parameter(torch.ones(1)) for _ in nets]
    assert [roots.of([parameter]) for parameter in alone] == [[]] * len(nets)
    assert len(searches) == 2 + names.MOST_SEARCHES


def test_a_model_that_something_else_takes_a_part_of_is_searched_for_anew(
    roots: Roots, searches: list[Set[int]]
) -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    nets = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(40)]
    assert outer(roots, *nets) == [[net] for net in nets]
    wrapped = [Wrapped(net) for net in nets]
    assert outer(roots, *nets) == [[each] for each in wrapped]
    num = len(searches)
    assert outer(roots, *nets) == [[each] for each in wrapped]
    assert len(searches) == num
    first, second, third, *_ = nets
    head, tied = nn.Sequential(first[0], nn.ReLU()), Tied(second[0].weight)
    compiled = torch.compile(wrapped[2], backend="eager")
    assert outer(roots, first, second, third) == [
        [wrapped[0], head],
        [wrapped[1], tied],
        [compiled],
    ]


def test_a_model_that_was_found_is_not_kept() -> None:
    net, roots = nn.Linear(2, 2), Roots()
    ref = weakref.ref(net)
    roots.of(net.parameters())
    del net
    gc.collect()
    assert ref() is None


def test_what_decides_the_steps_is_told_in_words() -> None:
    net = nn.Linear(4, 2)
    optimizers = [
        torch.optim.SGD([{"params": [net.weight], "momentum": 0.9}, {"params": [net.bias]}], lr=0.1)
    ]
    told = described(optimizers[0], optimizers, "c")
    assert told["settings"].endswith(": lr 0.1, momentum 0.9; lr 0.1")
    assert told["parameters"].endswith(": 2 of 10 values, as they follow each other")
    turned = torch.optim.SGD([net.bias, net.weight], lr=0.1)
    assert described(turned, [turned], "c")["parameters"] != told["parameters"]


def test_state_that_is_other_tensors_each_step_does_not_grow_what_is_kept() -> None:
    class Moving(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def, override]
            super().step(closure)
            for state in self.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].clone()

    net = nn.Linear(4, 2)
    optimizer = Moving(net.parameters(), lr=0.1, momentum=0.9)
    watched = WatchedUpdate(
        optimizer,
        dict(net.named_parameters()),
        fingerprint_for(torch.device("cpu")),
        num_tokens=1,
        last_step=None,
    )
    kept = []
    for _ in range(6):
        net(torch.ones(1, 4)).sum().backward()
        watched.take()
        optimizer.step()
        assert watched.end() is not None
        kept.append(index_of_all.cache_info().currsize)
    assert kept[2] == kept[-1]
