"""Rows that grow: equal to rows put together anew, and seldom copied."""

import torch
from torch import Tensor

from model_check.model import CACHE_STRIDE, KVCache


def some(num: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, num, 4, generator=torch.Generator().manual_seed(seed))


def test_what_is_appended_stands_behind_what_was_there() -> None:
    nums = [5, *[1] * (2 * CACHE_STRIDE), 3 * CACHE_STRIDE, 1]
    keys = [some(num, seed) for seed, num in enumerate(nums)]
    values = [some(num, -seed) for seed, num in enumerate(nums)]
    cache = KVCache()
    for pair in zip(keys, values, strict=True):
        found = cache.append(*pair)
    assert torch.equal(found[0], torch.cat(keys, dim=2))
    assert torch.equal(found[1], torch.cat(values, dim=2))
    assert cache.num_tokens == sum(nums)


def test_nothing_is_copied_while_there_is_room() -> None:
    cache = KVCache()
    place = cache.append(some(5))[0].data_ptr()
    for _ in range(CACHE_STRIDE):
        assert cache.append(some(1))[0].data_ptr() == place
    assert cache.append(some(1))[0].data_ptr() != place
