"""Documents -> a token store in a directory of the caller's. Memory stays bounded: a few batches of
documents, never the whole text. A build that was killed is continued from its last note."""

import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from model_check.data.build.encode import Encoder, EncoderSpec, Task, tasks_of
from model_check.data.build.progress import BuildProgress
from model_check.data.build.store_writer import EncodedTask, Note, StoreWriter, last_note
from model_check.data.build.workers import WorkerPool
from model_check.data.cache.publish import check_room, storage_errors, write_synced
from model_check.data.cache.shards import NOTHING
from model_check.data.read.manifest import (
    MANIFEST,
    MAX_UINT16_VOCAB,
    TOKENIZER,
    TokensManifest,
    hash_of,
    to_bytes,
)
from model_check.data.read.windows import Layout
from model_check.data.sources.chat import ChatTemplate
from model_check.data.sources.source import Source, nothing_usable
from model_check.data.sources.spans import PIECE_BYTES
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.backends import BackendName, CheckedEncoder, choose_backend
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.errors import ModelCheckError
from model_check.utils.cores import usable_cores
from model_check.utils.held import HeldDirectory
from model_check.utils.words import Say

SHARD_TOKENS = 1 << 23
"""16 MiB of uint16. Readers take it from the manifest."""
_TASKS_WORTH_A_WORKER: dict[BackendName, int] = {"tokenizers": 4, "tiktoken": 8, "gigatoken": 64}
"""A process needs 0.3 s to start, so it is not worth starting for a text that is done by then. A
task is 2 MiB; the backends take 2, 10, and 100 MB/s. With fewer tasks there are fewer
processes."""


@dataclass(frozen=True)
class BuildOptions:
    """How a store is built. None of this changes a byte."""

    backend: BackendName = "tokenizers"
    num_workers: int | None = 1
    """Processes where the text is long enough; None: one a core."""
    save_every_s: float = 2.0
    """Between two notes of progress: a kill loses at most the work of so long."""
    task_bytes: int = PIECE_BYTES
    """Text that a process gets at once."""
    tasks_a_worker: int | None = None
    """How many tasks are worth starting a process; None: as many as take longer than its start."""


IN_THIS_PROCESS = BuildOptions()


@dataclass
class Room:
    """Whether the disk has room for the whole store, by the part that is written."""

    root: Path
    next_look: float = 0.05
    """At this fraction of the text: of less, it may be another kind of text than the rest."""

    def check(self, size: int, fraction: float | None) -> None:
        """`size`: bytes that are written of `fraction` of the text; None: nobody knows how much
        there is. Looks each time that the text has doubled. Raises PlaceError where the disk would
        be full before the end."""
        if fraction and fraction >= self.next_look:
            self.next_look = 2 * fraction
            check_room(self.root, int(size / fraction) - size)


def build_tokens(
    directory: HeldDirectory,
    source: Source,
    tokenizer: TextTokenizer,
    key: dict[str, Any],
    max_tokens: int | None,
    say: Say,
    shard_tokens: int = SHARD_TOKENS,
    options: BuildOptions = IN_THIS_PROCESS,
    progress: BuildProgress | None = None,
    begin_id: int | None = None,
    layout: Layout | None = None,
    chat: ChatTemplate | None = None,
) -> TokensManifest:
    """Fill `directory` with the store of `key`: every file synced, the manifest last. Continues
    what it holds of the same store.

    Stops after exactly `max_tokens` where given. `begin_id` begins each document; None: nothing
    does. `layout`, `chat`: of examples, and what makes text of those that are messages. Raises
    DataError (the text), StorageError (the disk), InternalError (a worker died).
    """
    progress = progress or BuildProgress(source.size_bytes, max_tokens, say)
    fresh = Note(
        hash=hash_of(key),
        tokenizer=write_synced(directory, TOKENIZER, tokenizer.to_json().encode()),
        shard_tokens=shard_tokens,
        task_bytes=options.task_bytes,
        targets=None if layout is None else NOTHING,
    )
    note = _going_on(directory, fresh, progress, say)
    dtype = dtype_for(tokenizer.vocab_size)
    store = StoreWriter(directory, note, dtype, max_tokens, options.save_every_s)
    room = Room(directory.path.parent)
    try:
        missing = encoded_tasks(store, source, tokenizer, options, say, begin_id)
        with store.opened(), closing(missing) as tasks:
            for is_exact in store.write(tasks):
                progress.advance(store.note.num_bytes, store.tokens.num_items)
                if is_exact:
                    room.check(store.size, progress.fraction)
    except ModelCheckError:
        _say_repairs(store.repairs(), say)
        raise
    progress.finish()
    _say_repairs(store.repairs(), say)
    if not store.ends.num_items:
        raise nothing_usable(source.name, store.repairs())
    manifest = _manifest_of(store, key, source, tokenizer, chat if store.note.is_chat else None)
    write_synced(directory, MANIFEST, to_bytes(manifest))
    _remove_strays(directory, manifest)
    return manifest


def _going_on(directory: HeldDirectory, fresh: Note, progress: BuildProgress, say: Say) -> Note:
    """The note of what is on the disk of this store; else `fresh`."""
    note = last_note(directory, fresh)
    if note is not fresh:
        say(f"data: going on after {note.tokens.num_items:,} tokens, which are on the disk")
        progress.resume(note.num_bytes, note.tokens.num_items)
    return note


def encoded_tasks(
    store: StoreWriter,
    source: Source,
    tokenizer: TextTokenizer,
    options: BuildOptions,
    say: Say,
    begin_id: int | None = None,
) -> Generator[EncodedTask, None, None]:
    """What `store` lacks of the source, in order, here or by processes. Raises DataError."""
    backend = choose_backend(options.backend, tokenizer)
    say(f"data: tokenizing with {backend.why}")
    checked = CheckedEncoder(backend, tokenizer)
    encoder = Encoder(checked, tokenizer.end_id, store.dtype, begin_id)
    missing = islice(tasks_of(source, options.task_bytes), store.note.num_tasks, None)
    num_workers, tasks = plan_workers(missing, backend.name, options)
    skip = store.note.num_documents
    if num_workers < 2:
        yield from _encoded_here(tasks, encoder, skip)
        return
    spec = EncoderSpec(
        tokenizer_json=tokenizer.to_json(),
        tokenizer_name=tokenizer.name,
        end_token=tokenizer.end_token,
        backend=backend.name,
        dtype=store.dtype,
        limit=store.max_tokens,
        begin_id=begin_id,
    )
    with WorkerPool(num_workers, spec) as pool:
        yield from _encoded_by(pool, tasks, encoder, skip)


def plan_workers(
    tasks: Iterator[Task], backend: BackendName, options: BuildOptions
) -> tuple[int, Iterator[Task]]:
    """(processes that have enough to do, all tasks). Fewer than two are not worth starting."""
    most = options.num_workers or usable_cores()
    each = options.tasks_a_worker or _TASKS_WORTH_A_WORKER[backend]
    first = list(islice(tasks, each * most)) if most > 1 else []
    return min(most, len(first) // each), chain(first, tasks)


def _encoded_here(tasks: Iterable[Task], encoder: Encoder, skip: int) -> Iterator[EncodedTask]:
    """`skip`: documents of the first task that are finished."""
    for task in tasks:
        repairs = Repairs()
        yield EncodedTask(task, repairs, encoder.batches(task, repairs, skip))
        skip = 0


def _encoded_by(
    pool: WorkerPool, tasks: Iterable[Task], encoder: Encoder, skip: int
) -> Iterator[EncodedTask]:
    """By the pool, except tasks that are not bounded."""
    for task, result in pool.results(tasks):
        if result is None:
            yield from _encoded_here([task], encoder, skip)
        else:
            repairs, encoded = result
            yield EncodedTask(task, repairs, [encoded.without(skip)])
        skip = 0


def _remove_strays(directory: HeldDirectory, manifest: TokensManifest) -> None:
    """The note of progress, and files of a killed builder that this store does not have."""
    with storage_errors(directory.path.parent):
        for name in directory.names():
            if name not in manifest.files and name != MANIFEST:
                directory.unlink(name)


def _manifest_of(
    store: StoreWriter,
    key: dict[str, Any],
    source: Source,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
) -> TokensManifest:
    import tokenizers

    repairs = store.repairs()
    return TokensManifest(
        hash=store.note.hash,
        key=key,
        dtype=store.dtype,
        shard_tokens=store.note.shard_tokens,
        num_tokens=store.tokens.num_items,
        num_documents=store.ends.num_items,
        vocab_size=tokenizer.vocab_size,
        end_token=tokenizer.end_token,
        end_id=tokenizer.end_id,
        dataset=source.name,
        tokenizer=tokenizer.name,
        repairs=repairs.counts,
        repair_places=repairs.places,
        has_targets=store.targets is not None,
        chat=None if chat is None else chat.kept(),
        files={**store.files, TOKENIZER: store.note.tokenizer},
        built_with={
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "tokenizers": tokenizers.__version__,
        },
    )


def _say_repairs(repairs: Repairs, say: Say) -> None:
    for line in repairs.lines():
        say(f"data: {line}")


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= MAX_UINT16_VOCAB else "uint32"
