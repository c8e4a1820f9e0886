"""Rows that grow: equal to rows put together anew, whoever appends, and seldom copied."""

import torch
from torch import Tensor

from model_check.models.kv_cache import STRIDE, Cached


def some(num: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, num, 4, generator=torch.Generator().manual_seed(seed))


def test_what_is_appended_stands_behind_what_was_there() -> None:
    parts = [some(5), *(some(1, seed) for seed in range(2 * STRIDE)), some(3 * STRIDE), some(1)]
    grown = Cached(parts[0])
    for part in parts[1:]:
        grown = grown.appended(part)
    assert torch.equal(grown.rows, torch.cat(parts, dim=2))
    assert grown.num == grown.rows.shape[2]


def test_two_can_go_on_from_one() -> None:
    shared = Cached(some(5)).appended(some(1))
    first, second = shared.appended(some(2, seed=1)), shared.appended(some(2, seed=2))
    again = first.appended(some(1, seed=3))
    assert torch.equal(first.rows, torch.cat((some(5), some(1), some(2, seed=1)), dim=2))
    assert torch.equal(second.rows, torch.cat((some(5), some(1), some(2, seed=2)), dim=2))
    assert torch.equal(again.rows[:, :, -1:], some(1, seed=3))
    assert shared.num == 6


def test_nothing_is_copied_while_there_is_room() -> None:
    grown = Cached(some(5)).appended(some(1))
    place = grown.rows.data_ptr()
    for _ in range(STRIDE - 1):
        grown = grown.appended(some(1))
        assert grown.rows.data_ptr() == place
    assert grown.appended(some(1)).appended(some(1)).rows.data_ptr() != place
