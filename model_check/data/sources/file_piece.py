"""A part of one text file that is read without the rest: a worker's portion."""

import codecs
import gzip
import io
import json
import shlex
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from model_check.config.dataset import PACKED, SUFFIXES, TEXT
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
from model_check.utils.first_bytes import LONGEST_HEAD, PARQUET, is_page, what_begins, what_is
from model_check.utils.words import first_line

_DAMAGED = "it is cut off or damaged: fetch it again"
_LONG_WINDOW = "Frame requires too much memory"
_PARQUET_ROWS = 64
"""In memory at once: a dictionary of a few bytes may stand for rows of a MiB each."""
_LARGEST_ROW_GROUP = 32 * PIECE_BYTES
"""A larger one is streamed here: a worker would hold all its tokens at once."""


@dataclass
class _Position:
    """How far a piece was read whose text has another size than its part of the file."""

    num_stored: int
    """Bytes of the file."""
    num_read: int = 0


@dataclass(frozen=True)
class FilePiece:
    """Bytes [start, end) of running text or of a .jsonl file, or the row groups [start, end) of a
    .parquet file, or a whole packed file."""

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
    position: _Position | None = field(default=None, compare=False)
    """Of a packed file, or of parquet."""

    @property
    def num_bytes_stored(self) -> int:
        return self.num_bytes if self.position is None else self.position.num_stored

    @property
    def num_bytes_read(self) -> int | None:
        return None if self.position is None else self.position.num_read

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
            yield from without_bom(self._packed_lines(), self.name)
            return
        with self.file.open("rb") as file:
            file.seek(self.start)
            span = io.BytesIO(file.read(self.end - self.start))
        yield from span if self.start else without_bom(span, self.name)

    def _packed_lines(self) -> Iterator[bytes]:
        with self.file.open("rb") as packed, _unpacked(self.file, packed) as stream:
            while line := read_line(stream, self.file):
                if self.position is not None:
                    self.position.num_read = packed.tell()
                yield line

    def _rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        """(a row, `file, row N`)"""
        with _parquet(self.file) as table:
            columns = self._columns(table.schema_arrow.names)
            groups = range(self.start, self.end)
            batches = table.iter_batches(_PARQUET_ROWS, row_groups=list(groups), columns=columns)
            num_rows = max(1, sum(table.metadata.row_group(group).num_rows for group in groups))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows):
                if self.position is not None:
                    self.position.num_read = self.position.num_stored * (number + 1) // num_rows
                yield row, f"{self.name}, row {self.first + number}"

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
            size = file.stat().st_size
            yield piece(0, 0, 1, size, bounded=False, position=_Position(size))
        case ".parquet":
            first = 1
            groups, size = _row_groups(file, form.column), file.stat().st_size
            unpacked = max(1, sum(num_bytes for _, num_bytes in groups))
            for start, end in _neighbours([num_bytes for _, num_bytes in groups]):
                num_bytes = sum(num_bytes for _, num_bytes in groups[start:end])
                bounded = num_bytes <= _LARGEST_ROW_GROUP
                position = _Position(size * num_bytes // unpacked)
                yield piece(start, end, first, num_bytes, bounded=bounded, position=position)
                first += sum(num_rows for num_rows, _ in groups[start:end])
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


def _neighbours(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Row groups [start, end) that are read together: opening the file takes as long for one of a
    row as for one of a thousand."""
    start, total = 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > PIECE_BYTES:
            yield start, number
            start, total = number, 0
        total += size
    if sizes:
        yield start, len(sizes)


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
        what = what_is(file)
        why = f"it is {what}" if what and what != PARQUET else f"{first_line(error)}; {_DAMAGED}"
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
        ends = " (its lines end in CR: tr '\\r' '\\n')" if "\r" in line.strip() else ""
        repairs.add(f"line skipped: not JSON{ends}", place)
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


def plain_suffix(file: Path) -> str:
    """Its suffix without the packing; empty for files of no format that is read."""
    suffix = suffix_of(file) or ""
    return suffix[: suffix.index(".", 1)] if is_packed(file) else suffix


def format_of(file: Path) -> str:
    """The same, but .txt for all running text."""
    kind = plain_suffix(file)
    return ".txt" if kind in TEXT else kind


def _unpacked(file: Path, opened: BinaryIO) -> io.BufferedIOBase:
    """Close it. Raises DataError where pyarrow, which reads zstd, is missing. Reading raises
    OSError, EOFError or zlib.error for a file that is cut off or not packed."""
    if file.name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=opened)
    stream = _import_pyarrow(file, "zstd").input_stream(opened, compression="zstd")
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
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = getattr(error, "filename", None) or file
        if _LONG_WINDOW in reason:
            reason = (
                "its zstd window is longer than 128 MiB; pack it again: "
                f"zstd -dc --long=31 {shlex.quote(str(name))} | zstd --long=27 -o NEW"
            )
        elif not getattr(error, "errno", None):  # what unpacks it says so
            reason = f"{reason}; {_DAMAGED}"
        raise DataError(f"{name}: cannot be read: {reason}") from error
