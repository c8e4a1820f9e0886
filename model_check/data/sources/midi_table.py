"""What a table says of a folder's MIDI files: composer, year, whatever its columns are."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_check.errors import DataError
from model_check.utils.files import read_text
from model_check.utils.words import printable

Row = Mapping[str, str]
USUAL_NAME = "metadata.csv"
_LONGEST = 1 << 26
"""Bytes."""


@dataclass(frozen=True)
class MidiTable:
    """Rows of files."""

    path: Path
    columns: Sequence[str]
    rows: Mapping[str, Row]
    """By the path of the file, relative to its folder."""

    def row(self, file: str) -> Row:
        """Empty where the table does not name the file."""
        return self.rows.get(file, {})

    def check(self, columns: Sequence[str]) -> None:
        """Raises DataError where one is missing."""
        for column in columns:
            if column not in self.columns:
                there = ", ".join(map(printable, self.columns))
                raise DataError(
                    f"data.validation: {self.path}: no column {column!r} (there are {there})"
                )


def read_table(directory: Path, files: Sequence[str]) -> MidiTable:
    """That of a folder: metadata.csv, or its only .csv, in it or else beside it. Its column that
    names most of `files`, which are relative to the folder, tells which row is whose. Raises
    DataError."""
    path = _table_of(directory)
    rows = _rows(path)
    columns = list(rows[0]) if rows else []
    known = set(files)
    counts = {column: sum(row[column] in known for row in rows) for column in columns}
    naming = max(counts, key=counts.__getitem__, default=None)
    if naming is None or not counts[naming]:
        raise DataError(
            f"data.validation: {path}: no column has the paths of MIDI files in {directory} "
            f"(such as {files[0]})"
        )
    return MidiTable(path, columns, {row[naming]: row for row in rows})


def _table_of(directory: Path) -> Path:
    """Raises DataError."""
    for place in (directory, directory.absolute().parent):
        tables = sorted(place.glob("*.csv"))
        usual = [table for table in tables if table.name == USUAL_NAME]
        if usual or len(tables) == 1:
            return (usual or tables)[0]
        if tables:
            names = ", ".join(printable(table.name) for table in tables)
            raise DataError(
                f"data.validation: {place}: several tables ({names}): call one {USUAL_NAME}"
            )
    raise DataError(
        f"data.validation: COLUMN:VALUE of MIDI files needs a table of them: {USUAL_NAME}, or one "
        f".csv file, in {directory} or beside it"
    )


def _rows(path: Path) -> list[Row]:
    """Raises DataError."""
    try:
        text = read_text(path, _LONGEST)
        table = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
        names = table.fieldnames or []
        return [{name: row[name] for name in names} for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read as a table: {why}") from error
