"""Documents -> a token store in a directory of the caller's. Memory stays bounded: a few batches of
documents, never the text. A build that was killed goes on where it had come to."""

import sys
from typing import Any

import numpy as np

from model_check.data.build.filling import Filling, How
from model_check.data.build.unfinished import read
from model_check.data.cache.publish import storage_errors, write_synced
from model_check.data.read.manifest import (
    MANIFEST,
    TOKENIZER,
    FileEntry,
    TokensManifest,
    hash_of,
    to_bytes,
)
from model_check.data.sources.progress import Progress, Say
from model_check.data.sources.source import Source, nothing_usable
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.errors import ModelCheckError
from model_check.utils.held import HeldDirectory

SHARD_TOKENS = 1 << 23
"""16 MiB of uint16. Readers take it from the manifest."""
AS_IT_COMES = How()
"""In this process, with `tokenizers`."""


def build_tokens(
    directory: HeldDirectory,
    source: Source,
    tokenizer: TextTokenizer,
    key: dict[str, Any],
    max_tokens: int | None,
    say: Say,
    shard_tokens: int = SHARD_TOKENS,
    how: How = AS_IT_COMES,
    progress: Progress | None = None,
) -> TokensManifest:
    """Fill `directory` with the store of `key`, every file synced, the manifest last; go on with
    what it holds of that very store.

    Stops after exactly `max_tokens` where given. Raises DataError (the text), StorageError (the
    disk), InternalError (a worker died).
    """
    progress = progress or Progress(source.size_bytes, max_tokens, say)
    found = read(directory, hash_of(key), shard_tokens, how.task_bytes)
    tokenizer_file = write_synced(directory, TOKENIZER, tokenizer.to_json().encode())
    if found is not None and found.tokenizer != tokenizer_file:
        found = None
    store = Filling(
        directory, hash_of(key), tokenizer, tokenizer_file, max_tokens, shard_tokens, how, found
    )
    if found is not None:
        say(f"data: going on after {store.tokens.num_items:,} tokens, which are on the disk")
        progress.resume(store.num_bytes, store.tokens.num_items)
    _fill(store, source, progress, say)
    progress.finish()
    _say_repairs(store.repairs(), say)
    if not store.ends.num_items:
        raise nothing_usable(source.name, store.repairs())
    manifest = _manifest_of(store, key, source, tokenizer, tokenizer_file, shard_tokens)
    write_synced(directory, MANIFEST, to_bytes(manifest))
    _remove_strays(directory, manifest)
    return manifest


def _fill(store: Filling, source: Source, progress: Progress, say: Say) -> None:
    try:
        with store:
            for num_bytes in store.fill(source, say):
                progress.advance(num_bytes, store.tokens.num_items)
    except ModelCheckError:
        _say_repairs(store.repairs(), say)
        raise


def _remove_strays(directory: HeldDirectory, manifest: TokensManifest) -> None:
    """The notes of progress, and what a killed builder left that this store does not have."""
    with storage_errors(directory.path.parent):
        for name in directory.names():
            if name not in manifest.files and name != MANIFEST:
                directory.unlink(name)


def _manifest_of(
    store: Filling,
    key: dict[str, Any],
    source: Source,
    tokenizer: TextTokenizer,
    tokenizer_file: FileEntry,
    shard_tokens: int,
) -> TokensManifest:
    repairs = store.repairs()
    return TokensManifest(
        hash=hash_of(key),
        key=key,
        dtype=store.dtype,
        shard_tokens=shard_tokens,
        num_tokens=store.tokens.num_items,
        num_documents=store.ends.num_items,
        vocab_size=tokenizer.vocab_size,
        end_token=tokenizer.end_token,
        end_id=tokenizer.end_id,
        dataset=source.name,
        tokenizer=tokenizer.name,
        repairs=repairs.counts,
        repair_places=repairs.places,
        files={**store.tokens.files, **store.ends.files, TOKENIZER: tokenizer_file},
        built_with=_versions(),
    )


def _say_repairs(repairs: Repairs, say: Say) -> None:
    for line in repairs.lines():
        say(f"data: {line}")


def _versions() -> dict[str, str]:
    import tokenizers

    return {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }
