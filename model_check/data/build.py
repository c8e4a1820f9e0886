"""Documents -> a token store in a directory of the caller's. Memory stays bounded: a batch of
documents, never the text."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model_check.data.manifest import (
    DOCUMENTS,
    MANIFEST,
    MAX_UINT16_VOCAB,
    TOKENIZER,
    FileEntry,
    TokensManifest,
    hash_of,
    shard_name,
    to_bytes,
)
from model_check.data.publish import storage_errors
from model_check.data.sources import Source
from model_check.data.text import Repairs
from model_check.data.tokenizer import TextTokenizer
from model_check.utils.files import sync

SHARD_TOKENS = 1 << 25
"""64 MiB of uint16. Readers take it from the manifest."""
_BATCH_CHARACTERS = 1 << 20
_SAY_EVERY_S = 2.0
_MB = 1e6

Say = Callable[[str], None]


def build_tokens(
    directory: Path,
    source: Source,
    tokenizer: TextTokenizer,
    key: dict[str, Any],
    max_tokens: int | None,
    say: Say,
    shard_tokens: int = SHARD_TOKENS,
) -> TokensManifest:
    """Fill `directory` with the store of `key`, every file synced, the manifest last.

    Stops after exactly `max_tokens` where given. Raises DataError (the text), StorageError (the
    disk).
    """
    dtype = _dtype_for(tokenizer.vocab_size)
    repairs = Repairs()
    batches = _encoded(source.documents(repairs), tokenizer, dtype, max_tokens)
    tokens = _ShardWriter(directory, shard_name, dtype, shard_tokens)
    ends = _ShardWriter(directory, lambda _: DOCUMENTS, "uint64", None)
    progress = _Progress(source.size_bytes, say)
    with tokens, ends:
        for texts, ids, batch_ends in batches:
            tokens.write(ids)
            ends.write(batch_ends)
            progress.advance(texts, tokens.num_items)
    progress.finish(tokens.num_items)
    for line in repairs.lines():
        say(f"data: {line}")
    manifest = TokensManifest(
        hash=hash_of(key),
        key=key,
        dtype=dtype,
        shard_tokens=shard_tokens,
        num_tokens=tokens.num_items,
        num_documents=ends.num_items,
        vocab_size=tokenizer.vocab_size,
        end_token=tokenizer.end_token,
        end_id=tokenizer.end_id,
        dataset=source.name,
        tokenizer=tokenizer.name,
        repairs=repairs.counts,
        files={**tokens.files, **ends.files, **_write_tokenizer(directory, tokenizer)},
        built_with=_versions(),
    )
    write_synced(directory / MANIFEST, to_bytes(manifest))
    return manifest


def write_synced(path: Path, data: bytes) -> FileEntry:
    """Write a whole new file of a directory that is being filled, fsync it. Raises StorageError."""
    with storage_errors(path.parent.parent):
        path.write_bytes(data)
        sync(path)
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


class _ShardWriter:
    """Appends arrays to files of at most `shard_items`, each hashed on the way and synced.

    With write(), never through a writable memory map: a full disk is an error there, a SIGBUS here.
    """

    def __init__(
        self,
        directory: Path,
        name_of: Callable[[int], str],
        dtype: str,
        shard_items: int | None,
    ) -> None:
        self.num_items = 0
        self.files: dict[str, FileEntry] = {}
        self._directory = directory
        self._name_of = name_of
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_items = shard_items

    def __enter__(self) -> "_ShardWriter":
        with storage_errors(self._directory.parent):
            self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # what is buffered may not fit either
                self._file.close()
            return
        with storage_errors(self._directory.parent):
            self._close()

    def write(self, items: NDArray[Any]) -> None:
        """Raises StorageError."""
        with storage_errors(self._directory.parent):
            while self._shard_items and self._held + items.size > self._shard_items:
                room = self._shard_items - self._held
                self._append(items[:room])
                items = items[room:]
                self._close()
                self._open()
            self._append(items)

    def _append(self, items: NDArray[Any]) -> None:
        raw = items.astype(self._dtype, copy=False).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._held += items.size
        self.num_items += items.size

    def _open(self) -> None:
        self._name = self._name_of(len(self.files))
        self._file = (self._directory / self._name).open("xb")
        self._digest = hashlib.sha256()
        self._held = 0

    def _close(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        self.files[self._name] = FileEntry(size=size, sha256=self._digest.hexdigest())


def _dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= MAX_UINT16_VOCAB else "uint32"


class _Progress:
    """A line every few seconds: where, how fast."""

    def __init__(self, size_bytes: int | None, say: Say) -> None:
        self._of = f" of {size_bytes / _MB:,.1f}" if size_bytes else ""
        self._say = say
        self._characters = 0
        self._started = self._said = time.monotonic()

    def advance(self, texts: list[str], num_tokens: int) -> None:
        self._characters += sum(map(len, texts))
        if time.monotonic() - self._said >= _SAY_EVERY_S:
            self._said = time.monotonic()
            self._say(f"data: tokenizing, {self._line(num_tokens)}")

    def finish(self, num_tokens: int) -> None:
        self._say(f"data: tokenized, {self._line(num_tokens)}")

    def _line(self, num_tokens: int) -> str:
        read = self._characters / _MB
        speed = read / max(1e-9, time.monotonic() - self._started)
        return f"{read:,.1f}{self._of} MB, {num_tokens:,} tokens, {speed:.1f} MB/s"


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


def _encoded(
    documents: Iterable[str], tokenizer: TextTokenizer, dtype: str, max_tokens: int | None
) -> Iterator[tuple[list[str], NDArray[Any], NDArray[np.uint64]]]:
    """(texts, their ids with an end token after each, where each ends in the whole): a batch a
    turn, the last one cut at `max_tokens`."""
    num_tokens = 0
    for texts in _batches(documents):
        each = [np.array([*ids, tokenizer.end_id], dtype) for ids in tokenizer.encode(texts)]
        ids = np.concatenate(each)
        ends = num_tokens + np.cumsum([array.size for array in each], dtype=np.uint64)
        if max_tokens is not None and ends[-1] >= max_tokens:
            ends = np.minimum(ends[: np.searchsorted(ends, max_tokens) + 1], np.uint64(max_tokens))
            yield texts, ids[: max_tokens - num_tokens], ends
            return
        num_tokens += ids.size
        yield texts, ids, ends


def _write_tokenizer(directory: Path, tokenizer: TextTokenizer) -> dict[str, FileEntry]:
    return {TOKENIZER: write_synced(directory / TOKENIZER, tokenizer.to_json().encode())}


def _versions() -> dict[str, str]:
    import tokenizers

    return {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }
