"""Entries made again although they are whole: taken out of the way first."""

from contextlib import suppress
from pathlib import Path

from model_check.data.publish import beside, forget, storage_errors
from model_check.data.wanted import Wanted


def discard(wanted: Wanted) -> None:
    """Remove what is there of `wanted`. Whoever has its files mapped keeps them. Raises
    StorageError."""
    for part in (wanted, *wanted.beside.values()):
        for entry in (part.view, part.store):
            if entry.exists():
                _remove(part.root, part.store_name, entry)
        forget(part.root, part.store_name)  # else its finished shards would be gone on from


def _remove(root: Path, key_hash: str, entry: Path) -> None:
    # Gone at the end, so nobody sees half an entry; no entry: somebody else does the same.
    with beside(root, key_hash) as directory, storage_errors(root), suppress(FileNotFoundError):
        entry.rename(directory / entry.name)
