"""Where text comes from: the protocol of a source."""

from collections.abc import Iterator
from typing import Any, Protocol

from model_check.data.text import Repairs


class Source(Protocol):
    """A text to train on. Two sources with one identity yield the same documents."""

    @property
    def name(self) -> str:
        """What every record calls it: `embedded`, `Salesforce/wikitext`, `notes.txt`."""

    @property
    def label(self) -> str:
        """Its part of the cache directory's name."""

    @property
    def size_bytes(self) -> int | None:
        """About how much text it holds, for progress and free space; None: unknown."""

    @property
    def endless(self) -> bool:
        """Whether it is too big to be prepared whole, so that a count must bound it."""

    def identity(self) -> dict[str, Any]:
        """Its content, never its place or time: its part of the cache key. Raises DataError."""

    def documents(self, repairs: Repairs) -> Iterator[str]:
        """Every usable document, in an order that the identity fixes. Raises DataError."""
