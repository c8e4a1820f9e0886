"""The files of a token store while they are filled, and how far into the source they reach."""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model_check.data.build.encode import Coding, Encoded, Order, Task, encoded, tasks_of
from model_check.data.build.unfinished import Unfinished, save
from model_check.data.build.workers import Crew
from model_check.data.cache.shards import ShardWriter
from model_check.data.read.manifest import DOCUMENTS, MAX_UINT16_VOCAB, FileEntry, shard_name
from model_check.data.sources.progress import Say
from model_check.data.sources.source import Source
from model_check.data.sources.spans import PIECE_BYTES
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.backends import BackendName, checked, choose_backend
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.utils.cores import usable_cores
from model_check.utils.held import HeldDirectory

_TASKS_WORTH_A_WORKER: dict[BackendName, int] = {"tokenizers": 4, "tiktoken": 8, "gigatoken": 64}
"""A process needs 0.3 s to start: it is not for a text that is done by then. A task is 2 MiB; they
take 3 to 10, 10, and 100 MB/s. With fewer tasks there are fewer processes."""


@dataclass(frozen=True)
class How:
    """How a store is built: nothing of it changes a byte."""

    backend: BackendName = "tokenizers"
    num_workers: int | None = 1
    """Processes where the text is long enough; None: one a core."""
    save_every_s: float = 2.0
    """Between two notes of how far it has come: what a kill costs at most."""
    task_bytes: int = PIECE_BYTES
    """What a process gets at once."""
    tasks_a_worker: int | None = None
    """From so many for each on, processes are started; None: when that is quicker."""


class Filling:
    """The files of a store, and how far into the source they reach."""

    def __init__(
        self,
        directory: HeldDirectory,
        key_hash: str,
        tokenizer: TextTokenizer,
        tokenizer_file: FileEntry,
        max_tokens: int | None,
        shard_tokens: int,
        how: How,
        found: Unfinished | None,
    ) -> None:
        """Goes on after `found`, which is on the disk."""
        self.dtype = dtype_for(tokenizer.vocab_size)
        self._directory = directory
        self._hash = key_hash
        self._tokenizer = tokenizer
        self._tokenizer_file = tokenizer_file
        self._max_tokens = max_tokens
        self._shard_tokens = shard_tokens
        self._how = how
        self.num_bytes = found.num_bytes if found else 0
        self._num_tasks = found.num_tasks if found else 0
        self._num_documents = found.num_documents if found else 0
        self._repairs = found.repaired() if found else Repairs()
        self._repairs_of_task = Repairs()
        tokens, ends = (found.tokens, found.ends) if found else (None, None)
        self.tokens = ShardWriter(directory, shard_name, self.dtype, shard_tokens, tokens)
        self.ends = ShardWriter(directory, lambda _: DOCUMENTS, "uint64", None, ends)

    def __enter__(self) -> "Filling":
        self.tokens.__enter__()
        try:
            self.ends.__enter__()
        except BaseException as error:
            self.tokens.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.tokens.__exit__(kind)
        finally:
            self.ends.__exit__(kind)

    def repairs(self) -> Repairs:
        """Of all that was read so far."""
        all_of_them = Repairs.of(self._repairs.counts, self._repairs.places)
        all_of_them.merge(self._repairs_of_task)
        return all_of_them

    def fill(self, source: Source, say: Say) -> Iterator[int]:
        """Append all that is missing; yields how much text each time. Raises DataError."""
        saved = time.monotonic()
        with closing(self._missing(source, say)) as batches:
            for batch in batches:
                closed = len(self.tokens.files)
                if batch is not None and not self._append(batch):
                    return
                late = time.monotonic() - saved >= self._how.save_every_s
                if late or len(self.tokens.files) > closed:
                    self._save()
                    saved = time.monotonic()
                yield 0 if batch is None else batch.num_bytes

    def _missing(self, source: Source, say: Say) -> Generator[Encoded | None, None, None]:
        """Batches; None where a task ends."""
        backend = choose_backend(self._how.backend, self._tokenizer)
        say(f"data: tokenizing with {backend.why}")
        tasks = islice(tasks_of(source, self._how.task_bytes), self._num_tasks, None)
        num_workers = self._how.num_workers or usable_cores()
        a_worker = self._how.tasks_a_worker or _TASKS_WORTH_A_WORKER[backend.name]
        first = list(islice(tasks, a_worker * num_workers)) if num_workers > 1 else []
        num_workers = min(num_workers, len(first) // a_worker)
        encode = checked(backend, self._tokenizer, say)
        coding = Coding(encode, self._tokenizer.end_id, self.dtype)
        if num_workers < 2:
            yield from self._here(chain(first, tasks), coding)
            return
        with Crew(num_workers, self._order(backend.name)) as crew:
            yield from self._there(chain(first, tasks), crew, coding)

    def _order(self, backend: BackendName) -> Order:
        return Order(
            tokenizer_json=self._tokenizer.to_json(),
            tokenizer_name=self._tokenizer.name,
            backend=backend,
            dtype=self.dtype,
            limit=self._max_tokens,
        )

    def _here(self, tasks: Iterable[Task], coding: Coding) -> Iterator[Encoded | None]:
        for task in tasks:
            yield from encoded(task, self._repairs_of_task, coding, skip=self._num_documents)
            self._task_is_done()
            yield None

    def _there(self, tasks: Iterable[Task], crew: Crew, coding: Coding) -> Iterator[Encoded | None]:
        """By the crew; what it must not hold as a whole, here."""
        for task, done in crew.results(tasks):
            if done is None:
                yield from self._here([task], coding)
                continue
            self._repairs_of_task = done.repairs
            yield replace(done.encoded.without(self._num_documents), num_bytes=task.num_bytes)
            self._task_is_done()
            yield None

    def _task_is_done(self) -> None:
        self._repairs.merge(self._repairs_of_task)
        self._repairs_of_task = Repairs()
        self._num_tasks += 1
        self._num_documents = 0

    def _append(self, batch: Encoded) -> bool:
        """False once `max_tokens` are there: the last document may be cut."""
        before = self.tokens.num_items
        ends = before + np.cumsum(batch.lengths, dtype=np.uint64)
        ids = batch.ids
        full = self._max_tokens is not None and before + ids.size >= self._max_tokens
        if full:
            ids, ends = _cut(ids, ends, before, self._max_tokens or 0)
        self.tokens.write(ids)
        self.ends.write(ends)
        self._num_documents += ends.size
        self.num_bytes += batch.num_bytes
        return not full

    def _save(self) -> None:
        save(
            self._directory,
            Unfinished(
                hash=self._hash,
                tokenizer=self._tokenizer_file,
                shard_tokens=self._shard_tokens,
                task_bytes=self._how.task_bytes,
                num_tasks=self._num_tasks,
                num_documents=self._num_documents,
                num_bytes=self.num_bytes,
                tokens=self.tokens.save(),
                ends=self.ends.save(),
                repairs=self._repairs.counts,
                repair_places=self._repairs.places,
            ),
        )


def _cut(
    ids: NDArray[Any], ends: NDArray[np.uint64], before: int, max_tokens: int
) -> tuple[NDArray[Any], NDArray[np.uint64]]:
    last = np.searchsorted(ends, max_tokens) + 1
    return ids[: max_tokens - before], np.minimum(ends[:last], np.uint64(max_tokens))


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= MAX_UINT16_VOCAB else "uint32"
