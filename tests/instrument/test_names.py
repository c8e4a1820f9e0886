"""What is found of models and optimizers, in one process."""

import gc
import weakref
from collections.abc import Set

import pytest
import torch
from torch import nn

from model_check.forensics.checksums import index_of_all
from model_check.forensics.fingerprint import fingerprint_for
from model_check.instrument import names
from model_check.instrument.build import described
from model_check.instrument.names import Roots
from model_check.instrument.update import WatchedUpdate


def test_of_very_many_optimizers_not_each_one_searches_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nets = [nn.Linear(2, 2) for _ in range(names.MOST_SEARCHES + 4)]
    both, roots, searches = nn.ModuleList(nets), Roots(), 0

    def search(ids: Set[int]) -> list[nn.Module]:
        nonlocal searches
        searches += 1
        return real(ids)

    real = names._search
    monkeypatch.setattr(names, "_search", search)
    found = [roots.of(net.parameters()) for net in nets]
    assert [[root.outer for root in each] for each in found] == [[both]] * len(nets)
    assert searches == 1 + names.MOST_SEARCHES
    new = nn.Linear(2, 2)
    assert [root.outer for root in roots.of(new.parameters())] == [new]
    alone = [nn.Parameter(torch.ones(1)) for _ in nets]
    assert [roots.of([parameter]) for parameter in alone] == [[]] * len(nets)
    assert searches == 2 + 2 * names.MOST_SEARCHES


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
