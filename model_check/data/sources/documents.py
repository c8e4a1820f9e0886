"""What a source yields: documents, as running text, as prompt and target, or as ids; and how a row
of JSONL, parquet or the hub becomes one."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from model_check.data.sources.text import Repairs, clean, decode
from model_check.utils.words import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COLUMNS_IN_MESSAGE = 8
_KEY_CHARACTERS = 40


class Part(NamedTuple):
    """A stretch of an example. Parts are tokenized apart, as a prompt alone is when a model is
    asked to go on with it: no token reaches from a prompt into its target."""

    text: str
    is_target: bool
    """The model is to learn it; else it is only read."""


class Example(NamedTuple):
    """A document of which only a part is to be learned."""

    parts: tuple[Part, ...]
    contents: tuple[str, ...] | None = None
    """Of the messages that a chat template rendered: what spells a special token outside of them is
    that token. None: no template did, and such a spelling is text."""
    place: str = ""
    """For messages."""


@dataclass(frozen=True)
class TokenIds:
    """A document of a source that has ids and no text."""

    ids: "NDArray[np.int64]"
    """Those that mark the document are not among them."""


Document = str | Example | TokenIds


def text_of(document: Document) -> str:
    """What a tokenizer is trained on."""
    match document:
        case str():
            return document
        case Example():
            return "".join(part.text for part in document.parts)
        case TokenIds():
            raise AssertionError("ids come with their vocabulary")


class RowForm(Protocol):
    """How a row becomes a document."""

    @property
    def column(self) -> str | None:
        """The only one that is read; None: every column."""

    def document(self, row: object, place: str, repairs: Repairs) -> Document | None:
        """None: it holds none, which is counted. Raises DataError where no row can hold one."""

    def identity(self) -> dict[str, Any]:
        """Its part of the cache key."""


@dataclass(frozen=True)
class TextColumn:
    """One column holds the text of the document."""

    column: str

    def document(self, row: object, place: str, repairs: Repairs) -> str | None:
        if not isinstance(row, Mapping) or self.column not in row:
            kind = f"row skipped: no {self.column!r} in it (data.text_column)"
            repairs.add(kind, f"{place}, keys: {keys_of(row)}")
        elif isinstance(value := row[self.column], str):
            return clean(value, place, repairs)
        elif isinstance(value, bytes):  # a binary column of parquet
            return clean(decode(value, place, 1, repairs), place, repairs)
        else:
            repairs.add(f"row skipped: {self.column!r} is not a string", place)
        return None

    def identity(self) -> dict[str, Any]:
        return {"text_column": self.column}


def keys_of(row: object) -> str:
    """The first names of what a row holds, for people."""
    keys = islice(row, _COLUMNS_IN_MESSAGE) if isinstance(row, Mapping) else ()
    return ", ".join(printable(str(key)[:_KEY_CHARACTERS]) for key in keys) or "none"
