"""Where text comes from: the protocol of a source, and of its parts."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from model_check.data.sources.text import Repairs
from model_check.errors import DataError


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


class Piece(Protocol):
    """A part of a source that can be read without the rest, in another process too."""

    @property
    def num_bytes(self) -> int:
        """About how much text it holds."""

    @property
    def bounded(self) -> bool:
        """Whether its tokens may lie in memory all at once."""

    def documents(self, repairs: Repairs) -> Iterator[str]:
        """Every usable document of this part. Raises DataError."""


@runtime_checkable
class Splittable(Protocol):
    """A source that can be read piece by piece: the documents of all pieces, in their order, are
    the documents of the source."""

    def pieces(self) -> Iterator[Piece]:
        """Raises DataError."""


def nothing_usable(name: str, repairs: Repairs) -> DataError:
    found = "; ".join(repairs.lines()) or "it is empty"
    return DataError(f"{name}: no usable text: {found}")
