"""Entries made again although they are whole: taken out of the way first."""

import os

from model_check.data.build.wanted import Wanted
from model_check.data.cache.publish import forget, take_away


def discard(wanted: Wanted) -> None:
    """Remove what is there of `wanted`. Whoever has its files mapped keeps them. Raises
    StorageError."""
    for part in (wanted, *wanted.beside.values()):
        for entry in (part.view, part.store):
            if os.path.lexists(entry):
                take_away(part.root, part.store_name, entry)
        forget(part.root, part.store_name)  # else its finished shards would be gone on from
