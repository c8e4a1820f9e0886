"""The files of a token store while they are written, and the note that says how much of the source
is in them: written every few seconds, read by the next builder of the same store after a kill."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from model_check.data.build.encode import Encoded, Task
from model_check.data.cache.publish import UNFINISHED, storage_errors
from model_check.data.cache.shards import NOTHING, ShardWriter, Written, intact
from model_check.data.read.manifest import (
    DOCUMENTS,
    LONGEST,
    FileEntry,
    shard_name,
    targets_name,
)
from model_check.data.sources.text import Repairs
from model_check.utils.held import HeldDirectory

_RECIPE = 2
"""Counts changes of how a source is divided into tasks."""
_OF_THIS_BUILD = ("recipe", "hash", "tokenizer", "shard_tokens", "task_bytes")


class EncodedTask(NamedTuple):
    """What a task gives. Its repairs are complete once its documents, in batches, were read."""

    task: Task
    repairs: Repairs
    batches: Iterable[Encoded]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A position between two documents of the source, and what is on the disk up to there."""

    schema: Literal[1] = 1
    recipe: int = _RECIPE
    hash: str
    """sha256 of the store's whole key."""
    tokenizer: FileEntry
    shard_tokens: int
    task_bytes: int
    num_tasks: int = 0
    """Tasks that are finished."""
    num_documents: int = 0
    """Documents of the next task that are finished."""
    num_bytes: int = 0
    """About the bytes of the source that are finished."""
    num_bytes_before: int = 0
    """Those of the finished tasks."""
    tokens: Written = NOTHING
    ends: Written = NOTHING
    targets: Written | None = None
    """None: the store has none, since all of it is learned."""
    is_chat: bool = False
    """A chat template made text of some documents."""
    repairs: dict[str, int] = {}
    """Those of the finished tasks."""
    repair_places: dict[str, str] = {}


def last_note(directory: HeldDirectory, fresh: Note) -> Note:
    """The note in `directory`, if it is of the same build as `fresh` and the disk holds every byte
    that it counts; else `fresh`."""
    with suppress(OSError, ValueError):
        note = msgspec.json.decode(directory.read(UNFINISHED, LONGEST), type=Note)
        if (
            all(getattr(note, name) == getattr(fresh, name) for name in _OF_THIS_BUILD)
            and intact(directory, shard_name, note.tokens)
            and intact(directory, _documents_name, note.ends)
            and (note.targets is None or intact(directory, targets_name, note.targets))
        ):
            return note
    return fresh


@dataclass
class StoreWriter:
    """Appends documents to the files of a store, from where `note` says; `opened` for that."""

    directory: HeldDirectory
    note: Note
    dtype: Literal["uint16", "uint32"]
    max_tokens: int | None
    save_every_s: float

    def __post_init__(self) -> None:
        place, note = self.directory, self.note
        self.tokens = ShardWriter(place, shard_name, self.dtype, note.shard_tokens, note.tokens)
        self.ends = ShardWriter(place, _documents_name, "uint64", None, note.ends)
        self.targets = (
            None
            if note.targets is None
            else ShardWriter(place, targets_name, "uint8", note.shard_tokens, note.targets)
        )
        self._repairs = Repairs()

    @property
    def files(self) -> dict[str, FileEntry]:
        """Those that are finished."""
        learned = {} if self.targets is None else self.targets.files
        return {**self.tokens.files, **self.ends.files, **learned}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Raises StorageError."""
        with ExitStack() as stack:
            for writer in (self.tokens, self.ends, self.targets):
                if writer is not None:
                    stack.enter_context(writer)
            yield

    def repairs(self) -> Repairs:
        """Of all that was read so far."""
        repairs = Repairs(dict(self.note.repairs), dict(self.note.repair_places))
        repairs.merge(self._repairs)
        return repairs

    @property
    def size(self) -> int:
        """Bytes of its numbers."""
        return sum(
            writer.num_items * np.dtype(writer.dtype).itemsize
            for writer in (self.tokens, self.ends, self.targets)
            if writer is not None
        )

    def write(self, tasks: Iterable[EncodedTask]) -> Iterator[bool]:
        """Append the documents that `note` does not count, until `max_tokens` tokens are there.
        Yields after each step whether the note tells exactly how far the source was read. Raises
        StorageError, and what `tasks` raise."""
        saved = time.monotonic()
        num_shards = len(self.tokens.files)
        for task, repairs, batches in tasks:
            self._repairs = repairs
            for batch in chain(batches, [None]):
                if batch is None:
                    self._finish_task(task)
                elif not self._append(batch, task):
                    yield True
                    return
                late = time.monotonic() - saved >= self.save_every_s
                if late or len(self.tokens.files) > num_shards:
                    self._save()
                    saved, num_shards = time.monotonic(), len(self.tokens.files)
                yield batch is None or task.num_bytes_read is not None

    def _finish_task(self, task: Task) -> None:
        repairs = self.repairs()
        num_bytes = self.note.num_bytes
        if task.num_bytes_stored:
            num_bytes = self.note.num_bytes_before + task.num_bytes_stored
        self.note = replace(
            self.note,
            num_tasks=self.note.num_tasks + 1,
            num_documents=0,
            num_bytes=num_bytes,
            num_bytes_before=num_bytes,
            repairs=repairs.counts,
            repair_places=repairs.places,
        )
        self._repairs = Repairs()

    def _append(self, batch: Encoded, task: Task) -> bool:
        """False once `max_tokens` are there; the last document may be cut."""
        before = self.tokens.num_items
        ends = before + np.cumsum(batch.lengths, dtype=np.uint64)
        limit = before + batch.ids.size if self.max_tokens is None else self.max_tokens
        ends = np.minimum(ends[: np.searchsorted(ends, limit) + 1], np.uint64(limit))
        self.tokens.write(batch.ids[: limit - before])
        self.ends.write(ends)
        if self.targets is not None and batch.targets is not None:
            self.targets.write(batch.targets[: limit - before])
        self.note = replace(
            self.note,
            num_documents=self.note.num_documents + ends.size,
            num_bytes=self._num_bytes_after(batch, task),
            is_chat=self.note.is_chat or batch.is_chat,
        )
        return self.max_tokens is None or self.tokens.num_items < limit

    def _num_bytes_after(self, batch: Encoded, task: Task) -> int:
        """The text of a row is a part of its line, and more than its part of a packed file."""
        before = self.note.num_bytes_before
        num_bytes = self.note.num_bytes + batch.num_bytes
        if task.num_bytes_read is not None:
            num_bytes = before + task.num_bytes_read
        most = task.num_bytes_stored
        return min(num_bytes, before + most) if most else num_bytes

    def _save(self) -> None:
        targets = None if self.targets is None else self.targets.save()
        tokens, ends = self.tokens.save(), self.ends.save()
        self.note = replace(self.note, tokens=tokens, ends=ends, targets=targets)
        with storage_errors(self.directory.path.parent):
            self.directory.replace(UNFINISHED, msgspec.json.encode(self.note))


def _documents_name(number: int) -> str:
    """All document ends are in one file."""
    return DOCUMENTS
