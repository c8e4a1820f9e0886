"""Documents -> ids with an end token after each, task by task. What a task is depends on the text
alone, so any number of workers gives the same bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.sources.source import Piece, Source, Splittable
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.backends import BackendName, CheckedEncode

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Task:
    """Pieces in a row: together about `How.task_bytes`, or one that is not bounded."""

    pieces: Sequence[Piece]
    is_first: bool = False
    """Whether the text begins with it: more of it is checked."""

    @property
    def bounded(self) -> bool:
        return self.pieces[0].bounded

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def documents(self, repairs: Repairs) -> Iterator[str]:
        for piece in self.pieces:
            yield from piece.documents(repairs)

    def __str__(self) -> str:
        first = self.pieces[0]
        place = f"{getattr(first, 'name', 'text')} from {getattr(first, 'first', 1)} on"
        return f"{place}, {self.num_bytes / 1e6:.1f} MB"


@dataclass(frozen=True)
class Encoded:
    """Some documents in a row."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    """Tokens of each document, its end token included; they sum to `ids.size`."""
    num_bytes: int
    """Of text, about."""

    def without(self, num_documents: int) -> "Encoded":
        """All but the first documents."""
        if not num_documents:
            return self
        start = int(self.lengths[:num_documents].sum())
        return Encoded(self.ids[start:], self.lengths[num_documents:], self.num_bytes)


@dataclass(frozen=True)
class Coding:
    """How documents become ids."""

    encode: CheckedEncode
    end_id: int
    dtype: str


@dataclass(frozen=True)
class Order:
    """What a worker process needs to know once."""

    tokenizer_json: str
    tokenizer_name: str
    backend: BackendName
    dtype: str
    limit: int | None
    """So many tokens of a task are enough."""


@dataclass(frozen=True)
class Done:
    """The answer to one task."""

    encoded: Encoded
    repairs: Repairs


def tasks_of(source: Source, task_bytes: int) -> Iterator[Task]:
    """All of the source, in order. Raises DataError."""
    for number, pieces in enumerate(_portions(source, task_bytes)):
        yield Task(pieces, is_first=number == 0)


def _portions(source: Source, task_bytes: int) -> Iterator[list[Piece]]:
    if not isinstance(source, Splittable):
        yield [_Whole(source)]
        return
    held: list[Piece] = []
    size = 0
    for piece in source.pieces():
        if held and (not piece.bounded or size + piece.num_bytes > task_bytes):
            yield held
            held, size = [], 0
        held.append(piece)
        size += piece.num_bytes
        if not piece.bounded:
            yield held
            held, size = [], 0
    if held:
        yield held


def encoded(
    task: Task, repairs: Repairs, coding: Coding, skip: int = 0, limit: int | None = None
) -> Iterator[Encoded]:
    """The documents of a task after the first `skip`, a batch a turn; none once `limit` tokens are
    there."""
    num_tokens = 0
    is_first = task.is_first and not skip
    for texts in _batches(islice(task.documents(repairs), skip, None)):
        batch = _joined(texts, coding, is_first)
        yield batch
        is_first = False
        num_tokens += batch.ids.size
        if limit is not None and num_tokens >= limit:
            return


def merged(batches: Sequence[Encoded], dtype: str) -> Encoded:
    """One for several."""
    ids = [batch.ids for batch in batches] or [np.empty(0, dtype)]
    lengths = [batch.lengths for batch in batches] or [np.empty(0, np.int64)]
    num_bytes = sum(batch.num_bytes for batch in batches)
    return Encoded(np.concatenate(ids), np.concatenate(lengths), num_bytes)


def _joined(texts: list[str], coding: Coding, is_first: bool) -> Encoded:
    each = coding.encode(texts, is_first)
    lengths = np.fromiter((ids.size + 1 for ids in each), np.int64, len(each))
    flat = np.empty(int(lengths.sum()), coding.dtype)
    start = 0
    for ids in each:
        flat[start : start + ids.size] = ids
        start += ids.size + 1
    flat[np.cumsum(lengths) - 1] = coding.end_id
    return Encoded(flat, lengths, sum(map(len, texts)))


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


@dataclass(frozen=True)
class _Whole:
    """A source that cannot be split, as its only piece."""

    source: Source
    bounded: bool = False

    @property
    def num_bytes(self) -> int:
        return self.source.size_bytes or 0

    def documents(self, repairs: Repairs) -> Iterator[str]:
        return self.source.documents(repairs)
