"""A part of one text file, read without the rest: what a worker gets to tokenize."""

import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from model_check.data.cache.memo import stat_signature
from model_check.data.sources.packed import PACKED, unpacked
from model_check.data.sources.rows import EVERY_ROW, RowRule
from model_check.data.sources.spans import PIECE_BYTES, document_spans, line_spans, read_line
from model_check.data.sources.text import (
    Repairs,
    clean,
    cut_into_documents,
    decode,
    without_bom,
)
from model_check.errors import DataError
from model_check.utils.words import printable

_LINES = (".txt", ".jsonl")
SUFFIXES = (*_LINES, *(kind + packing for kind in _LINES for packing in PACKED), ".parquet")
"""In upper case, too."""
_PARQUET_ROWS = 1024
_COLUMNS_IN_MESSAGE = 8
_KEY_CHARACTERS = 40
_LARGEST_ROW_GROUP = 32 * PIECE_BYTES
"""A larger one is streamed: a worker would hold its tokens all at once."""


@dataclass(frozen=True)
class FilePiece:
    """Bytes [start, end) of a .txt or .jsonl file; a row group of a .parquet file, whose rows are
    counted from `first`; the whole of a packed file."""

    file: Path
    name: str
    """Relative to the directory that was given: what people are told."""
    text_column: str
    signature: str
    """The file's `stat_signature` when its content was hashed."""
    start: int
    end: int
    first: int
    """Number of its first line or row, from 1."""
    num_bytes: int
    bounded: bool = True
    """Whether it is small enough to be tokenized in one go."""
    rows: RowRule = EVERY_ROW
    """Which lines of .jsonl and rows of .parquet are read."""

    def documents(self, repairs: Repairs) -> Iterator[str]:
        """Every usable document. Raises DataError: unreadable, or changed since it was hashed."""
        try:
            for text, place in self._texts(repairs):
                if (document := clean(text, place, repairs)) is not None:
                    yield document
            check_unchanged(self.file, self.signature)
        except (OSError, EOFError, zlib.error) as error:  # gzip: torn or not gzip at all
            raise unreadable(error, self.file) from error

    def _texts(self, repairs: Repairs) -> Iterator[tuple[str, str]]:
        """(text, `file:line`) as it stands in the file."""
        match format_of(self.file):
            case ".txt":
                for line, raw in cut_into_documents(self._lines()):
                    first = self.first + line - 1
                    yield decode(raw, self.name, first, repairs), f"{self.name}:{first}"
            case ".parquet":
                yield from self._rows(repairs)
            case _:
                for number, raw in enumerate(self._lines(), self.first):
                    text = decode(raw, self.name, number, repairs)
                    if (value := self._value(text, f"{self.name}:{number}", repairs)) is not None:
                        yield value, f"{self.name}:{number}"

    def _lines(self) -> Iterator[bytes]:
        if is_packed(self.file):
            with unpacked(self.file) as packed:
                lines = iter(lambda: read_line(packed, self.file), b"")
                yield from without_bom(lines, self.name)
            return
        with self.file.open("rb") as file:
            file.seek(self.start)
            span = io.BytesIO(file.read(self.end - self.start))
        yield from span if self.start else without_bom(span, self.name)

    def _value(self, line: str, place: str, repairs: Repairs) -> str | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            repairs.add("line skipped: not JSON", place)
            return None
        if not isinstance(row, dict) or self.text_column not in row:
            where = f"{place}, keys: {_keys_of(row)}"
            repairs.add(f"line skipped: no {self.text_column!r} in it", where)
            return None
        if not self.rows.keeps(row):
            return None
        value = row[self.text_column]
        if not isinstance(value, str):
            repairs.add(f"line skipped: {self.text_column!r} is not a string", place)
            return None
        return value

    def _rows(self, repairs: Repairs) -> Iterator[tuple[str, str]]:
        import pyarrow
        import pyarrow.parquet as parquet

        row = self.first - 1
        try:
            with parquet.ParquetFile(self.file) as table:
                columns = self._columns(table.schema_arrow.names)
                for batch in table.iter_batches(
                    _PARQUET_ROWS, row_groups=[self.start], columns=columns
                ):
                    for values in batch.to_pylist():
                        row += 1
                        if not self.rows.keeps(values):
                            continue
                        if isinstance(value := values[self.text_column], str):
                            yield value, f"{self.name}, row {row}"
                        else:
                            repairs.add("row skipped: not a string", f"{self.name}, row {row}")
        except pyarrow.ArrowException as error:
            raise _not_parquet(self.file, error) from error

    def _columns(self, available: list[str]) -> list[str]:
        deciding = [column for column in self.rows.columns if column in available]
        return list(dict.fromkeys([self.text_column, *deciding]))


def pieces_of(file: Path, name: str, text_column: str, signature: str) -> Iterator[FilePiece]:
    """The whole file, piece by piece. Raises DataError (also where it changed since it was hashed:
    a file that grew or shrank has other pieces), OSError."""
    match format_of(file):
        case _ if is_packed(file):
            size = file.stat().st_size
            yield FilePiece(file, name, text_column, signature, 0, 0, 1, size, bounded=False)
        case ".parquet":
            first = 1
            for group, (rows, size) in enumerate(_row_groups(file, text_column)):
                bounded = size <= _LARGEST_ROW_GROUP
                end = group + 1
                yield FilePiece(
                    file, name, text_column, signature, group, end, first, size, bounded
                )
                first += rows
        case kind:
            spans = document_spans(file) if kind == ".txt" else line_spans(file)
            for span in spans:
                start, end, first, size = *span, span.end - span.start
                yield FilePiece(file, name, text_column, signature, start, end, first, size)
    check_unchanged(file, signature)


def _row_groups(file: Path, column: str) -> list[tuple[int, int]]:
    """(rows, bytes when unpacked) of each row group."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"{file}: parquet needs the pyarrow package: pip install pyarrow"
        ) from error
    try:
        with parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if column not in columns:
                raise DataError(
                    f"{file}: no column {column!r} (there are {', '.join(columns)}); "
                    "set data.text_column"
                )
            groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
            return [(group.num_rows, group.total_byte_size) for group in groups]
    except pyarrow.ArrowException as error:
        raise _not_parquet(file, error) from error


def _keys_of(row: object) -> str:
    keys = islice(row, _COLUMNS_IN_MESSAGE) if isinstance(row, dict) else ()
    return ", ".join(printable(key[:_KEY_CHARACTERS]) for key in keys) or "none"


def check_unchanged(file: Path, signature: str) -> None:
    """Raises DataError where a file is another one than when it was hashed, OSError."""
    if stat_signature(file) != signature:
        raise DataError(f"{file}: changed while it was read; run again once it is at rest")


def suffix_of(file: Path) -> str | None:
    """In lower case; None where text is not read from such files."""
    name = file.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def format_of(file: Path) -> str:
    """Its suffix without the packing."""
    suffix = suffix_of(file) or ""
    return suffix[: suffix.index(".", 1)] if is_packed(file) else suffix


def is_packed(file: Path) -> bool:
    return (suffix_of(file) or "").endswith(PACKED)


def unreadable(error: Exception, file: Path | None = None) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(f"{getattr(error, 'filename', None) or file}: cannot be read: {reason}")


def _not_parquet(file: Path, error: Exception) -> DataError:
    first_line = str(error).split("\n", 1)[0]
    return DataError(f"{file}: not readable as parquet: {first_line}")
