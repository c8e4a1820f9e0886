"""Which rows and files of a local text belong to a split: rows by the value of a column."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_check.config.validation import RowsWith, TextPath, What


@dataclass(frozen=True)
class RowRule:
    """The rows to read: those that hold `only` (None: all) and none of `without`."""

    only: RowsWith | None = None
    without: tuple[RowsWith, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that decide."""
        ours = self.without if self.only is None else (self.only, *self.without)
        return list(dict.fromkeys(rows.column for rows in ours))

    def keeps(self, row: Mapping[str, Any]) -> bool:
        if any(rows.holds(row) for rows in self.without):
            return False
        return self.only is None or self.only.holds(row)

    def identity(self) -> dict[str, Any]:
        """Its part of the cache key; empty for all rows."""
        key: dict[str, Any] = {}
        if self.only is not None:
            key["only"] = [self.only.column, self.only.value]
        if self.without:
            key["without"] = sorted([rows.column, rows.value] for rows in self.without)
        return key


EVERY_ROW = RowRule()


def rows_to_train(validation: Mapping[str, What]) -> RowRule:
    """All rows that belong to no validation split."""
    return RowRule(without=_by_column(validation))


def earlier_rows(name: str, validation: Mapping[str, What]) -> tuple[RowsWith, ...]:
    """Those of the splits before `name`: a row that fits two splits belongs to the first."""
    names = list(validation)
    return _by_column({other: validation[other] for other in names[: names.index(name)]})


def own_paths(validation: Mapping[str, What]) -> tuple[Path, ...]:
    """Files and directories that are validation splits: never read as training text."""
    whats = validation.values()
    return tuple(Path(what.path).expanduser() for what in whats if isinstance(what, TextPath))


def _by_column(validation: Mapping[str, What]) -> tuple[RowsWith, ...]:
    return tuple(what for what in validation.values() if isinstance(what, RowsWith))
