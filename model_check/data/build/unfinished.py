"""How far the building of a token store has come: written beside its files every few seconds, read
by whoever builds the same store after a kill."""

from contextlib import suppress
from typing import Literal

import msgspec

from model_check.data.cache.publish import UNFINISHED, storage_errors
from model_check.data.cache.shards import Written, intact
from model_check.data.read.manifest import DOCUMENTS, LONGEST, TOKENIZER, FileEntry, shard_name
from model_check.data.sources.text import Repairs
from model_check.utils.held import HeldDirectory

_RECIPE = 1
"""Counts changes of how a source is divided into tasks."""


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A position on a border of documents, and what is on the disk up to there."""

    schema: Literal[1] = 1
    recipe: int = _RECIPE
    hash: str
    """sha256 of the whole key: what another key left is never used."""
    tokenizer: FileEntry
    shard_tokens: int
    task_bytes: int
    num_tasks: int
    """Tasks that are finished."""
    num_documents: int
    """Documents of the next task that are finished."""
    num_bytes: int
    tokens: Written
    ends: Written
    repairs: dict[str, int]
    """Those of the finished tasks."""
    repair_places: dict[str, str]

    def repaired(self) -> Repairs:
        return Repairs.of(self.repairs, self.repair_places)


def save(directory: HeldDirectory, unfinished: Unfinished) -> None:
    """Raises StorageError."""
    with storage_errors(directory.path.parent):
        directory.replace(UNFINISHED, msgspec.json.encode(unfinished))


def read(
    directory: HeldDirectory, key_hash: str, shard_tokens: int, task_bytes: int
) -> Unfinished | None:
    """What `directory` holds of this very store, every byte of it checked; None: nothing."""
    with suppress(OSError, ValueError):
        found = msgspec.json.decode(directory.read(UNFINISHED, LONGEST), type=Unfinished)
        divided = (found.recipe, found.shard_tokens, found.task_bytes)
        ours = divided == (_RECIPE, shard_tokens, task_bytes) and found.hash == key_hash
        if ours and _whole(directory, found):
            return found
    return None


def _whole(directory: HeldDirectory, found: Unfinished) -> bool:
    tokenizer = Written(0, {}, found.tokenizer)
    return (
        intact(directory, shard_name, found.tokens)
        and intact(directory, lambda _: DOCUMENTS, found.ends)
        and intact(directory, lambda _: TOKENIZER, tokenizer)
    )
