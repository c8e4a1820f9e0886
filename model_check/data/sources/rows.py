"""Which rows and files of a local text belong to a split: rows by the value of a column."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_check.config.validation import RowsWith, TextPath, What


@dataclass(frozen=True)
class Value:
    """Rows whose `column`, as text, is `text`."""

    column: str
    text: str

    def __str__(self) -> str:
        return f"{self.column} = {self.text}"

    def holds(self, row: Mapping[str, Any]) -> bool:
        return self.column in row and str(row[self.column]) == self.text


@dataclass(frozen=True)
class RowRule:
    """The rows to read: those that hold `only` (None: all) and none of `without`."""

    only: Value | None = None
    without: tuple[Value, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that decide."""
        values = self.without if self.only is None else (self.only, *self.without)
        return list(dict.fromkeys(value.column for value in values))

    def keeps(self, row: Mapping[str, Any]) -> bool:
        if any(value.holds(row) for value in self.without):
            return False
        return self.only is None or self.only.holds(row)

    def identity(self) -> dict[str, Any]:
        """Its part of the cache key; empty for all rows."""
        key: dict[str, Any] = {}
        if self.only is not None:
            key["only"] = [self.only.column, self.only.text]
        if self.without:
            key["without"] = sorted([value.column, value.text] for value in self.without)
        return key


EVERY_ROW = RowRule()


def rows_to_train(validation: Mapping[str, What]) -> RowRule:
    """All rows that belong to no validation split."""
    return RowRule(without=_values(validation))


def earlier_values(name: str, validation: Mapping[str, What]) -> tuple[Value, ...]:
    """The values of the splits before `name`: a row that fits two splits belongs to the first."""
    names = list(validation)
    return _values({other: validation[other] for other in names[: names.index(name)]})


def own_paths(validation: Mapping[str, What]) -> tuple[Path, ...]:
    """Files and directories that are validation splits: never read as training text."""
    whats = validation.values()
    return tuple(Path(what.path).expanduser() for what in whats if isinstance(what, TextPath))


def _values(validation: Mapping[str, What]) -> tuple[Value, ...]:
    whats = validation.values()
    return tuple(Value(what.column, what.value) for what in whats if isinstance(what, RowsWith))
