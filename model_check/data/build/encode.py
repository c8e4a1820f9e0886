"""Documents -> ids with an end token after each, on request a begin token before it, and of
examples which ids are to be learned; task by task. Tasks depend on the text alone, so any number of
workers gives the same bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.sources.documents import Document, Example, TokenIds
from model_check.data.sources.source import Piece, Source, Splittable
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.backends import BackendName, CheckedEncoder, choose_backend
from model_check.data.tokenizers.tokenizer import TextTokenizer

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14
"""Memory holds hundreds of bytes for each, however short it is."""
Stretch = Sequence[int] | NDArray[Any]
"""Neighbouring ids."""


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

    @property
    def num_bytes_stored(self) -> int:
        """Its part of the source's size; 0: unknown."""
        return sum(piece.num_bytes_stored for piece in self.pieces)

    @property
    def num_bytes_read(self) -> int | None:
        """Of those, so far; None: they are not counted while they are read."""
        counts = [piece.num_bytes_read for piece in self.pieces]
        return None if None in counts else sum(count for count in counts if count is not None)

    def documents(self, repairs: Repairs) -> Iterator[Document]:
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
    """Approximate size of the text, without what a row holds besides."""
    targets: NDArray[np.bool_] | None = None
    """Of examples: which of `ids` are to be learned."""
    is_chat: bool = False
    """A chat template made text of some."""

    def without(self, num_documents: int) -> "Encoded":
        """All except the first documents."""
        start = int(self.lengths[:num_documents].sum())
        targets = None if self.targets is None else self.targets[start:]
        lengths = self.lengths[num_documents:]
        return Encoded(self.ids[start:], lengths, self.num_bytes, targets, self.is_chat)

    @classmethod
    def joined(cls, batches: Sequence["Encoded"], dtype: str, num_bytes: int) -> "Encoded":
        """All of them as one."""
        learned = [batch.targets for batch in batches if batch.targets is not None]
        return cls(
            np.concatenate([np.empty(0, dtype), *(batch.ids for batch in batches)]),
            np.concatenate([np.empty(0, np.int64), *(batch.lengths for batch in batches)]),
            num_bytes,
            np.concatenate(learned) if learned else None,
            any(batch.is_chat for batch in batches),
        )


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
    end_token: str | None = None
    """None: a known name."""


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

        raw = Tokenizer.from_str(spec.tokenizer_json)
        tokenizer = TextTokenizer(raw, spec.tokenizer_name, spec.end_token)
        backend = choose_backend(spec.backend, tokenizer)
        checked = CheckedEncoder(backend, tokenizer)
        return cls(checked, tokenizer.end_id, spec.dtype, spec.begin_id)

    def batches(self, task: Task, repairs: Repairs, skip: int = 0) -> Iterator[Encoded]:
        """The documents of a task after the first `skip`, in batches. Raises DataError."""
        is_first = task.is_first and not skip
        usable = self._usable(task.documents(repairs), repairs)
        for documents in _batches(islice(usable, skip, None)):
            yield self._encoded(documents, is_first)
            is_first = False

    def whole(self, task: Task, repairs: Repairs, limit: int | None) -> Encoded:
        """A task's documents together, or those of its first batches that have `limit` tokens.
        Raises DataError."""
        batches: list[Encoded] = []
        num_tokens = 0
        for batch in self.batches(task, repairs):
            batches.append(batch)
            num_tokens += batch.ids.size
            if limit is not None and num_tokens >= limit:
                break
        return Encoded.joined(batches, self.dtype, task.num_bytes)

    def _usable(self, documents: Iterable[Document], repairs: Repairs) -> Iterator[Document]:
        """Without those that have a word for which there is no token, and conversations in which a
        message would forge a token of the template."""
        for document in documents:
            if (word := self.checked.tokenizer.unknown_in(_texts_of(document))) is not None:
                place = document.place if isinstance(document, Example) else "a text"
                what = "document skipped: it has a word that is no token"
                repairs.add(what, f"{place}: {word!r}")
                continue
            if isinstance(document, Example) and (forged := self._forged(document)):
                what = f"conversation skipped: a message spells the token {forged}"
                repairs.add(what, document.place)
            else:
                yield document

    def _forged(self, example: Example) -> str | None:
        return self.checked.tokenizer.special_in(example.contents or ())

    def _encoded(self, documents: list[Document], is_first: bool) -> Encoded:
        """Of documents of one kind: a source has no other."""
        if isinstance(documents[0], Example):
            return self._examples([d for d in documents if isinstance(d, Example)], is_first)
        num_bytes = sum(map(size_of, documents))
        ids = [document.ids for document in documents if isinstance(document, TokenIds)]
        texts = [document for document in documents if isinstance(document, str)]
        return self._marked(ids or self.checked.encode(texts, is_first), num_bytes)

    def _examples(self, examples: list[Example], is_first: bool) -> Encoded:
        of_part = iter(self._parts(examples, is_first))
        each = [
            [
                *self._begin(example),
                *((next(of_part), part.is_target) for part in example.parts),
                *self._end(example),
            ]
            for example in examples
        ]
        stretches = [stretch for stretches in each for stretch in stretches]
        sizes = [len(ids) for ids, _ in stretches]
        return Encoded(
            np.concatenate([np.asarray(ids, self.dtype) for ids, _ in stretches]),
            np.array([sum(len(ids) for ids, _ in one) for one in each], np.int64),
            sum(map(size_of, examples)),
            np.repeat([is_target for _, is_target in stretches], sizes),
            any(example.contents is not None for example in examples),
        )

    def _parts(self, examples: list[Example], is_first: bool) -> list[Stretch]:
        """The ids of each part, in order."""
        plain = _texts(example for example in examples if example.contents is None)
        rendered = _texts(example for example in examples if example.contents is not None)
        of_plain: Iterator[Stretch] = iter(self.checked.encode(plain, is_first) if plain else ())
        of_rendered: Iterator[Stretch] = iter(self.checked.tokenizer.encode_rendered(rendered))
        return [
            next(of_plain if example.contents is None else of_rendered)
            for example in examples
            for _ in example.parts
        ]

    def _begin(self, example: Example) -> list[tuple[Stretch, bool]]:
        """A chat template writes its own."""
        if self.begin_id is None or example.contents is not None:
            return []
        return [([self.begin_id], False)]

    def _end(self, example: Example) -> list[tuple[Stretch, bool]]:
        """It is learned. Most chat templates write their own."""
        last = example.parts[-1].text
        has_own = example.contents is not None and self.checked.tokenizer.ends(last)
        return [] if has_own else [([self.end_id], True)]

    def _marked(self, each: Sequence[NDArray[Any]], num_bytes: int) -> Encoded:
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
        return Encoded(flat, lengths, num_bytes)


def _texts(examples: Iterable[Example]) -> list[str]:
    return [part.text for example in examples for part in example.parts]


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
    num_bytes_read: None = None

    @property
    def num_bytes(self) -> int:
        return self.source.size_bytes or 0

    @property
    def num_bytes_stored(self) -> int:
        return self.num_bytes

    def documents(self, repairs: Repairs) -> Iterator[Document]:
        return self.source.documents(repairs)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += size_of(document)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _texts_of(document: Document) -> Sequence[str]:
    match document:
        case str():
            return (document,)
        case Example():
            return [part.text for part in document.parts]
        case TokenIds():
            return ()


def size_of(document: Document) -> int:
    """About its bytes in the source."""
    match document:
        case str():
            return len(document)
        case Example():
            return sum(len(part.text) for part in document.parts)
        case TokenIds():
            return document.ids.size
