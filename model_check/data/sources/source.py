"""The protocols of a source of text and of its pieces."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from model_check.data.sources.documents import Document
from model_check.data.sources.text import Repairs
from model_check.errors import DataError


class Source(Protocol):
    """What is trained on. Two sources with one identity yield the same documents."""

    name: str
    """Its name in every record: `embedded`, `Salesforce/wikitext`, `notes.txt`."""
    label: str
    """Its part of the cache directory's name."""

    @property
    def size_bytes(self) -> int | None:
        """About the sum of its pieces' sizes, for progress and free space; None: unknown."""

    @property
    def endless(self) -> bool:
        """Whether it is too big to prepare whole, so that a number of samples must bound it."""

    def identity(self) -> dict[str, Any]:
        """Its part of the cache key: depends on its content, not on place or time. Raises
        DataError."""

    def documents(self, repairs: Repairs) -> Iterator[Document]:
        """Every usable document, in an order that depends on the identity alone; maybe none. Raises
        DataError."""


class Piece(Protocol):
    """A part of a source that can be read without the rest, also in another process."""

    @property
    def num_bytes(self) -> int:
        """Approximate size of the text."""

    @property
    def num_bytes_stored(self) -> int:
        """Its part of the source's `size_bytes`, packed where it is; 0: unknown."""

    @property
    def num_bytes_read(self) -> int | None:
        """How many of those `documents` has read so far; None: it does not count them."""

    @property
    def bounded(self) -> bool:
        """Whether memory has room for all its tokens at once."""

    def documents(self, repairs: Repairs) -> Iterator[Document]:
        """Every usable document of this part. Raises DataError."""


@runtime_checkable
class Splittable(Protocol):
    """A source that can be read piece by piece: the documents of its pieces, in order, are its
    documents."""

    def pieces(self) -> Iterator[Piece]:
        """Raises DataError."""


def nothing_usable(name: str, repairs: Repairs) -> DataError:
    found = "; ".join(repairs.lines()) or "it has no document"
    return DataError(f"{name}: no usable text: {found}")


def no_column(name: str, column: str, available: Sequence[str]) -> DataError:
    there = ", ".join(available)
    return DataError(f"{name}: no column {column!r} (there are {there}); set data.text_column")
