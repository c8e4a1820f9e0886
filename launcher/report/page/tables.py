"""Tables as a template takes them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct


class Table(Struct, frozen=True):
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def filled(columns: Iterable[Sequence[Any]]) -> Table:
    """Of columns (title, cell, cell, ...) those in which something stands; the first one always."""
    first, *others = columns
    kept = [first, *(column for column in others if any(column[1:]))]
    titles, *rows = zip(*kept, strict=True)
    return Table(titles, rows)
