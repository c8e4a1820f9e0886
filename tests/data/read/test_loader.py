"""Batches: a function of (seed, index), whoever prepares them."""

import os
import threading
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from model_check.data.read.loader import BatchLoader, evaluation_batches
from model_check.data.read.manifest import shard_name
from model_check.data.read.token_cache import TokenCache
from model_check.data.read.token_split import PADDING
from model_check.errors import DataError
from model_check.model import IGNORED
from tests.data.lab import WORDS, Lab
from tests.data.numbers import END_ID, NumberText, number_cache


@pytest.fixture
def cache(lab: Lab) -> TokenCache:
    text = " ".join(f"{WORDS}{number}" for number in range(40))
    return TokenCache.open(lab.prepare(lab.text(text)).path)


def loader(cache: TokenCache, *, seed: int = 42, num_workers: int = 0) -> BatchLoader:
    return BatchLoader(cache, batch_size=3, seed=seed, num_workers=num_workers)


def first(batches: BatchLoader, count: int, start: int = 0) -> torch.Tensor:
    stream = batches.batches(start)
    taken = [batch.inputs for batch in islice(stream, count)]
    stream.close()
    return torch.stack(taken)


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch")]


def test_targets_are_the_inputs_one_token_later(cache: TokenCache) -> None:
    batch = loader(cache).batch(0)
    assert batch.inputs.shape == batch.targets.shape == (3, 16)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_threads_do_not_change_the_batches(cache: TokenCache, num_workers: int) -> None:
    num_batches = cache.num_sequences  # three epochs
    firsts = range(0, 3 * num_batches, 3)
    expected = torch.stack([loader(cache).batch(first).inputs for first in firsts])
    assert torch.equal(first(loader(cache, num_workers=num_workers), num_batches), expected)


@pytest.mark.parametrize("start", [21, 22])
def test_a_run_resumes_by_the_number_of_its_next_sequence(cache: TokenCache, start: int) -> None:
    """Into the next epoch, and not only where a batch of this size begins."""
    whole = first(loader(cache, num_workers=1), 30).flatten(0, 1)
    rest = first(loader(cache, num_workers=1), 5, start).flatten(0, 1)
    assert torch.equal(rest, whole[start : start + 15])


def test_an_epoch_that_no_order_exists_for_is_told(cache: TokenCache) -> None:
    with pytest.raises(DataError, match=r"epoch [\d,]+ has no order of its own"):
        next(loader(cache).batches(10**15))


def test_another_seed_is_another_order(cache: TokenCache) -> None:
    assert not torch.equal(first(loader(cache), 4), first(loader(cache, seed=43), 4))
    assert not torch.equal(first(loader(cache), 4), first(loader(cache, seed=42 + 2**32), 4))


def test_an_epoch_has_every_sequence_once_and_the_next_another_order(cache: TokenCache) -> None:
    rows = first(loader(cache), 2 * cache.num_sequences).flatten(0, 1)
    epochs = rows[: 2 * cache.num_sequences].split(cache.num_sequences)
    counted = [Counter(tuple(row.tolist()) for row in epoch) for epoch in epochs]
    every = cache.gather(np.arange(cache.num_sequences))[:, :-1]
    assert counted[0] == counted[1] == Counter(tuple(row.tolist()) for row in every)
    assert not torch.equal(epochs[0], epochs[1])


def test_a_batch_says_which_document_a_token_is_of_when_asked(tmp_path: Path) -> None:
    numbers = NumberText(*(range(10 * n, 10 * n + 4) for n in range(20)))
    cache = number_cache(tmp_path, numbers, 12)
    assert BatchLoader(cache, 3, seed=1, num_workers=0).batch(0).documents is None
    batch = BatchLoader(cache, 3, seed=1, num_workers=0, documents=True).batch(0)
    assert batch.documents is not None
    assert batch.documents.shape == batch.inputs.shape
    for inputs, documents in zip(batch.inputs, batch.documents, strict=True):
        ended = (inputs == END_ID).cumsum(0)
        assert documents[0] == 0
        assert torch.equal(documents[1:], ended[:-1])


def test_padding_is_no_label_and_reads_as_the_end_token(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(12)), 5, tail="pad")
    (batch,) = evaluation_batches(cache, 8)
    assert batch.inputs[-1].tolist() == [10, 11, END_ID, END_ID, END_ID]
    assert batch.targets[-1].tolist() == [11, END_ID, PADDING, PADDING, PADDING]


def test_what_is_no_label_here_is_none_for_the_loss() -> None:
    assert PADDING == IGNORED


def test_closing_the_batches_stops_the_threads(cache: TokenCache) -> None:
    stream = loader(cache, num_workers=3).batches()
    next(stream)
    assert batch_threads()
    stream.close()
    assert not batch_threads()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failure_to_read_reaches_the_caller(
    lab: Lab, cache: TokenCache, num_workers: int
) -> None:
    (store,) = lab.stores()
    (store / shard_name(0)).unlink()
    with pytest.raises(DataError, match=r"tokens-00000.bin: cannot be opened"):
        next(loader(cache, num_workers=num_workers).batches())
    assert not batch_threads()


def test_a_shard_that_ends_early_is_an_error_and_no_endless_loop(
    lab: Lab, cache: TokenCache
) -> None:
    (store,) = lab.stores()
    os.truncate(store / shard_name(0), 100)
    unverified = TokenCache.open(cache.path, verify="off")
    with pytest.raises(DataError, match="shard 0 ends before token"):
        unverified.gather(np.arange(cache.num_sequences))


def test_token_ids_beyond_the_vocabulary_are_damage_and_not_a_models_fault(
    lab: Lab, cache: TokenCache
) -> None:
    (store,) = lab.stores()
    shard = store / shard_name(0)
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(DataError, match="the cache is damaged"):
        loader(TokenCache.open(cache.path)).batch(0)
