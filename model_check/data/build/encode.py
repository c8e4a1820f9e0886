"""Documents -> ids with an end token after each, on request a begin token before it, task by task.
Tasks depend on the text alone, so any number of workers gives the same bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.sources.source import Piece, Source, Splittable
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.backends import BackendName, CheckedEncoder, choose_backend
from model_check.data.tokenizers.tokenizer import TextTokenizer

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Task:
    """Neighbouring pieces: together about `BuildOptions.task_bytes`, or one unbounded piece."""

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
    """Some neighbouring documents."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    """Tokens of each document, those that mark it included; they sum to `ids.size`."""
    num_bytes: int
    """Approximate size of the text."""

    def without(self, num_documents: int) -> "Encoded":
        """All except the first documents."""
        start = int(self.lengths[:num_documents].sum())
        return Encoded(self.ids[start:], self.lengths[num_documents:], self.num_bytes)


TaskResult = tuple[Repairs, Encoded]
"""What a worker made of one task."""


@dataclass(frozen=True)
class EncoderSpec:
    """All that a process needs to make its Encoder."""

    tokenizer_json: str
    tokenizer_name: str
    backend: BackendName
    dtype: str
    limit: int | None
    """A task may end once it has so many tokens."""
    begin_id: int | None = None
    """See Encoder."""


@dataclass(frozen=True)
class Encoder:
    """Makes the ids of documents."""

    checked: CheckedEncoder
    end_id: int
    dtype: str
    begin_id: int | None = None
    """What begins each document; None: nothing does."""

    @classmethod
    def of(cls, spec: EncoderSpec) -> "Encoder":
        """Raises DataError."""
        from tokenizers import Tokenizer

        tokenizer = TextTokenizer(Tokenizer.from_str(spec.tokenizer_json), spec.tokenizer_name)
        backend = choose_backend(spec.backend, tokenizer)
        checked = CheckedEncoder(backend, tokenizer)
        return cls(checked, tokenizer.end_id, spec.dtype, spec.begin_id)

    def batches(self, task: Task, repairs: Repairs, skip: int = 0) -> Iterator[Encoded]:
        """The documents of a task after the first `skip`, in batches. Raises DataError."""
        is_first = task.is_first and not skip
        for texts in _batches(islice(task.documents(repairs), skip, None)):
            yield self._encoded(texts, is_first)
            is_first = False

    def whole(self, task: Task, repairs: Repairs, limit: int | None) -> Encoded:
        """A task's documents together, or those of its first batches that have `limit` tokens.
        Raises DataError."""
        batches = [Encoded(np.empty(0, self.dtype), np.empty(0, np.int64), 0)]
        num_tokens = 0
        for batch in self.batches(task, repairs):
            batches.append(batch)
            num_tokens += batch.ids.size
            if limit is not None and num_tokens >= limit:
                break
        ids = np.concatenate([batch.ids for batch in batches])
        return Encoded(ids, np.concatenate([b.lengths for b in batches]), task.num_bytes)

    def _encoded(self, texts: list[str], is_first: bool) -> Encoded:
        each = self.checked.encode(texts, is_first)
        num_before = 0 if self.begin_id is None else 1
        lengths = np.fromiter((num_before + ids.size + 1 for ids in each), np.int64, len(each))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        flat = np.empty(int(lengths.sum()), self.dtype)
        for start, ids in zip(starts + num_before, each, strict=True):
            flat[start : start + ids.size] = ids
        if self.begin_id is not None:
            flat[starts] = self.begin_id
        flat[ends - 1] = self.end_id
        return Encoded(flat, lengths, sum(map(len, texts)))


def tasks_of(source: Source, task_bytes: int) -> Iterator[Task]:
    """The whole source, in order. Raises DataError."""
    for number, pieces in enumerate(_groups(source, task_bytes)):
        yield Task(pieces, is_first=number == 0)


def _groups(source: Source, task_bytes: int) -> Iterator[list[Piece]]:
    pieces = source.pieces() if isinstance(source, Splittable) else [_Whole(source)]
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        alone = not piece.bounded
        if group and (alone or not group[0].bounded or size + piece.num_bytes > task_bytes):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.num_bytes
    if group:
        yield group


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
