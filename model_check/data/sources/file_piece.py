"""A part of one text file that is read without the rest: a worker's portion."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from model_check.data.cache.memo import stat_signature
from model_check.data.sources.documents import Document, RowForm, TextColumn
from model_check.data.sources.rows import EVERY_ROW, RowRule
from model_check.data.sources.source import no_column
from model_check.data.sources.spans import PIECE_BYTES, document_spans, line_spans, read_line
from model_check.data.sources.text import (
    Repairs,
    clean,
    cut_into_documents,
    decode,
    without_bom,
)
from model_check.errors import DataError
from model_check.utils.first_bytes import LONGEST_HEAD, is_page, what_begins, what_is
from model_check.utils.words import first_line

PACKED = (".gz", ".zst")
_LINES = (".txt", ".jsonl")
SUFFIXES = (*_LINES, *(kind + packing for kind in _LINES for packing in PACKED), ".parquet")
"""Also in upper case."""
_PARQUET_ROWS = 1024
_LARGEST_ROW_GROUP = 32 * PIECE_BYTES
"""A larger one is streamed here: a worker would hold all its tokens at once."""


@dataclass(frozen=True)
class FilePiece:
    """Bytes [start, end) of a .txt or .jsonl file, or a row group (number `start`) of a .parquet
    file, or a whole packed file."""

    file: Path
    name: str
    """Relative to the directory that was given: for messages."""
    form: RowForm
    """What a line of .jsonl or a row of .parquet is."""
    signature: str
    """The file's `stat_signature` when its content was hashed."""
    rows: RowRule
    """Which lines of .jsonl and rows of .parquet are read."""
    start: int
    end: int
    first: int
    """Number of its first line or row, from 1."""
    num_bytes: int
    bounded: bool = True
    """Whether memory has room for all its tokens at once."""

    def documents(self, repairs: Repairs) -> Iterator[Document]:
        """Every usable document. Raises DataError where the file is not readable, changed since it
        was hashed, or has no documents of this form."""
        with read_errors(self.file):
            yield from filter(None, self._documents(repairs))
            check_unchanged(self.file, self.signature)

    def _documents(self, repairs: Repairs) -> Iterator[Document | None]:
        match format_of(self.file):
            case ".txt":
                yield from self._texts(repairs)
            case ".parquet":
                for row, place in self._rows():
                    yield self._document(row, place, repairs)
            case _:
                for number, raw in enumerate(self._lines(), self.first):
                    text = decode(raw, self.name, number, repairs)
                    # A line may be as large as the memory allows: one copy of it is enough.
                    del raw
                    value = _parsed(text, f"{self.name}:{number}", repairs)
                    del text
                    yield self._document(value, f"{self.name}:{number}", repairs)

    def _texts(self, repairs: Repairs) -> Iterator[str | None]:
        if not isinstance(self.form, TextColumn):
            raise DataError(
                f"{self.file}: running text, where training.stage=prompt_target needs rows with "
                "prompt and completion, or messages (.jsonl, .parquet)"
            )
        for line, raw in cut_into_documents(self._lines()):
            first = self.first + line - 1
            text = decode(raw, self.name, first, repairs)
            yield clean(text, f"{self.name}:{first}", repairs)

    def _document(self, row: object, place: str, repairs: Repairs) -> Document | None:
        """None: an empty line, a row of another split, or one without a usable document."""
        if row is None or (isinstance(row, dict) and not self.rows.keeps(row)):
            return None
        return self.form.document(row, place, repairs)

    def _lines(self) -> Iterator[bytes]:
        if is_packed(self.file):
            with _unpacked(self.file) as stream:
                lines = iter(lambda: read_line(stream, self.file), b"")
                yield from without_bom(lines, self.name)
            return
        with self.file.open("rb") as file:
            file.seek(self.start)
            span = io.BytesIO(file.read(self.end - self.start))
        yield from span if self.start else without_bom(span, self.name)

    def _rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        """(a row, `file, row N`)"""
        with _parquet(self.file) as table:
            columns = self._columns(table.schema_arrow.names)
            batches = table.iter_batches(_PARQUET_ROWS, row_groups=[self.start], columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, self.first):
                yield row, f"{self.name}, row {number}"

    def _columns(self, available: list[str]) -> list[str]:
        if self.form.column is None:
            return available
        deciding = [column for column in self.rows.columns if column in available]
        return list(dict.fromkeys([self.form.column, *deciding]))


def pieces_of(
    file: Path, name: str, form: RowForm, signature: str, rows: RowRule = EVERY_ROW
) -> Iterator[FilePiece]:
    """The whole file, piece by piece. Raises DataError, also where it changed since it was hashed,
    since then its pieces are others; OSError."""
    _refuse_other_kind(file)
    piece = partial(FilePiece, file, name, form, signature, rows)
    match format_of(file):
        case _ if is_packed(file):
            yield piece(0, 0, 1, file.stat().st_size, bounded=False)
        case ".parquet":
            first = 1
            for group, (num_rows, size) in enumerate(_row_groups(file, form.column)):
                yield piece(group, group + 1, first, size, bounded=size <= _LARGEST_ROW_GROUP)
                first += num_rows
        case kind:
            for span in document_spans(file) if kind == ".txt" else line_spans(file):
                yield piece(*span, span.end - span.start)
    check_unchanged(file, signature)


def _refuse_other_kind(file: Path) -> None:
    """Raises DataError for a file that is not what its name says, OSError."""
    if is_packed(file) or (kind := format_of(file)) == ".parquet":
        return  # what reads these tells
    with file.open("rb") as opened:
        head = opened.read(LONGEST_HEAD)
    if (what := what_begins(head)) is not None and (kind != ".txt" or not is_page(head)):
        raise DataError(f"{file}: it is {what}, not {kind[1:]}")
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if kind == ".jsonl" and first.startswith(b"["):
        raise DataError(
            f"{file}: it is a JSON array, where each line is to be a row: "
            f"jq -c '.[]' {file.name} > rows.jsonl"
        )
    if kind == ".jsonl" and first.partition(b"\n")[0].strip() == b"{":
        raise DataError(
            f"{file}: its rows are written over several lines, where each line is to be one: "
            f"jq -c . {file.name} > rows.jsonl"
        )


def _row_groups(file: Path, column: str | None) -> list[tuple[int, int]]:
    """(rows, unpacked bytes) of each row group."""
    with _parquet(file) as table:
        columns = table.schema_arrow.names
        if column is not None and column not in columns:
            raise no_column(str(file), column, columns)
        groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


@contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    """The file as a ParquetFile. Raises DataError where it is none."""
    pyarrow = _import_pyarrow(file, "parquet")
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            yield table
    except pyarrow.ArrowException as error:
        why = f"it is {what}" if (what := what_is(file)) else first_line(error)
        raise DataError(f"{file}: not readable as parquet: {why}") from error


def _import_pyarrow(file: Path, needed_by: str) -> Any:
    """Raises DataError where it is missing."""
    try:
        import pyarrow
    except ImportError as error:
        message = f"{file}: {needed_by} needs the pyarrow package: pip install pyarrow"
        raise DataError(message) from error
    return pyarrow


def _parsed(line: str, place: str, repairs: Repairs) -> object:
    """What a line of JSON holds; None: nothing."""
    if not line.strip():
        return None
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        repairs.add("line skipped: not JSON", place)
        return None
    # A null is a row, too: one without a document.
    return row if row is not None else ()


def check_unchanged(file: Path, signature: str) -> None:
    """Raises DataError where a file changed since it was hashed, OSError."""
    if stat_signature(file) != signature:
        raise DataError(f"{file}: changed while it was read; run again once it is at rest")


def suffix_of(file: Path) -> str | None:
    """Its suffix in lower case; None for files of no format that is read."""
    name = file.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def format_of(file: Path) -> str:
    """Its suffix without the packing."""
    suffix = suffix_of(file) or ""
    return suffix[: suffix.index(".", 1)] if is_packed(file) else suffix


def _unpacked(file: Path) -> io.BufferedIOBase:
    """Close it. Raises DataError where pyarrow, which reads zstd, is missing. Reading raises
    OSError, EOFError or zlib.error for a file that is cut off or not packed."""
    if file.name.lower().endswith(".gz"):
        return gzip.open(file)
    stream = _import_pyarrow(file, "zstd").input_stream(str(file), compression="zstd")
    return io.BufferedReader(stream)


def is_packed(file: Path) -> bool:
    return (suffix_of(file) or "").endswith(PACKED)


@contextmanager
def read_errors(file: Path | None = None) -> Iterator[None]:
    """An error of reading becomes a DataError that names its file, or else `file`."""
    try:
        yield
    # EOFError, zlib.error: packed, but cut off, or not packed at all.
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        name = getattr(error, "filename", None) or file
        raise DataError(f"{name}: cannot be read: {reason}") from error
