"""Every batch against the definition of a window, written down here in plain Python: for training
and for evaluation, all batch sizes, tails, strides, lengths and splits."""

from collections.abc import Iterator
from itertools import islice, pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from model_check.data.read.loader import Batch, BatchLoader, evaluation_batches
from model_check.data.read.token_cache import TokenCache
from model_check.data.read.token_split import Split
from model_check.data.read.windows import Tail
from tests.data.numbers import END_ID, NumberText, number_cache

NO_LABEL = -100
BATCH_SIZES = (1, 2, 3, 4, 5)
SEED = 7
DOCUMENTS = [range(20 * n, 20 * n + 3 + n * n % 11) for n in range(14)]
"""No token is in two of them; 3 to 13 tokens each."""

Row = tuple[list[int], list[int]]
"""Inputs and targets of one sequence."""


def splits_of(cache: TokenCache, tail: Tail) -> Iterator[tuple[Split, Tail]]:
    """Validation never drops a tail."""
    for name in cache.splits:
        yield cache.split(name), tail if name == "train" else "pad"


def stream(split: Split) -> list[int]:
    """The tokens of a split: each document is in it or not, as its first token tells."""
    seen = set(split.gather(np.arange(split.num_sequences)).flatten().tolist())
    members = [document for document in DOCUMENTS if document[0] in seen]
    return [token for document in members for token in (*document, END_ID)]


def rows_of(tokens: list[int], length: int, stride: int, tail: Tail) -> list[Row]:
    """The sequences of a stream: one begins at every `stride`-th token, a label is the next token;
    with `pad` one more holds the labels that are left, filled up with end tokens."""
    rows, labelled, start = [], 0, 0
    while start + length < len(tokens):
        rows.append((tokens[start : start + length], tokens[start + 1 : start + 1 + length]))
        labelled, start = start + length, start + stride
    if tail == "pad" and labelled < len(tokens) - 1:
        inputs, targets = tokens[start : start + length], tokens[start + 1 :]
        inputs += [END_ID] * (length - len(inputs))
        rows.append((inputs, targets + [NO_LABEL] * (length - len(targets))))
    return rows


def labels_once(rows: list[Row], length: int, stride: int) -> list[Row]:
    """For evaluation: a label that the sequence before has counts there alone."""
    known = [NO_LABEL] * (length - stride)
    return [(i, t if n == 0 else known + t[len(known) :]) for n, (i, t) in enumerate(rows)]


def within_documents(rows: list[Row]) -> list[Row]:
    """With masked documents: what follows an end token is the label of nothing."""
    return [
        (i, [NO_LABEL if token == END_ID else label for token, label in zip(i, t, strict=True)])
        for i, t in rows
    ]


def order(num_sequences: int) -> Iterator[int]:
    """Which sequences training reads: permutations that follow each other."""
    epoch = 0
    while True:
        yield from np.random.RandomState([SEED, 0, epoch]).permutation(num_sequences).tolist()
        epoch += 1


def read(batch: Batch) -> list[Row]:
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


def share_memory(batch: Batch) -> bool:
    before = batch.targets.clone()
    batch.inputs.fill_(-7)
    return not torch.equal(batch.targets, before)


WINDOWS = [(1, 1), (4, 1), (4, 3), (4, 4), (7, 1), (7, 3), (7, 7)]
"""Length and stride."""


MASKED = pytest.mark.parametrize("masked", [False, True], ids=["one stream", "masked"])


@pytest.fixture(params=product(WINDOWS, ("drop", "pad"), (0.0, 0.3)), ids=str)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TokenCache, int, int, Tail]:
    (length, stride), tail, held = request.param
    fractions = {"held": held} if held else {}
    text = NumberText(*DOCUMENTS)
    cache = number_cache(tmp_path, text, length, stride=stride, tail=tail, fractions=fractions)
    return cache, length, stride, tail


@MASKED
def test_evaluation_reads_every_sequence_once_and_counts_every_label_once(
    case: tuple[TokenCache, int, int, Tail], masked: bool
) -> None:
    cache, length, stride, tail = case
    for split, its_tail in splits_of(cache, tail):
        tokens = stream(split)
        expected = labels_once(rows_of(tokens, length, stride, its_tail), length, stride)
        own = tokens[1:]
        if masked:
            expected = within_documents(expected)
            own = [label for token, label in pairwise(tokens) if token != END_ID]
        for batch_size in BATCH_SIZES:
            batches = list(evaluation_batches(split, batch_size, documents=masked))
            assert [row for batch in batches for row in read(batch)] == expected
            assert {len(batch.inputs) for batch in batches[:-1]} <= {batch_size}
            labels = [t for batch in batches for t in batch.targets.flatten().tolist()]
            counted = [label for label in labels if label != NO_LABEL]
            assert its_tail == "drop" or counted == own
            assert not any(map(share_memory, batches))


@MASKED
def test_training_reads_the_sequences_of_its_permutations(
    case: tuple[TokenCache, int, int, Tail], masked: bool
) -> None:
    cache, length, stride, tail = case
    for split, its_tail in splits_of(cache, tail):
        rows = rows_of(stream(split), length, stride, its_tail)
        rows = within_documents(rows) if masked else rows
        for batch_size in BATCH_SIZES:
            loader = BatchLoader(split, batch_size, SEED, num_workers=0, documents=masked)
            number = 2 * len(rows) // batch_size + 1  # into the third epoch
            batches = list(islice(loader.batches(), number))
            expected = [rows[n] for n in islice(order(len(rows)), number * batch_size)]
            assert [row for batch in batches for row in read(batch)] == expected
            assert not any(map(share_memory, batches))
