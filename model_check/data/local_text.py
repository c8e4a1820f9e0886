"""Text from a file or a directory of this machine: .txt, .jsonl, .jsonl.gz, .parquet."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.data.manifest import hash_of
from model_check.data.memo import Memo, file_sha256, stat_signature
from model_check.data.text import Repairs, clean, cut_into_documents, decode, without_bom
from model_check.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
_PARQUET_ROWS = 1024
_COLUMNS_IN_MESSAGE = 8


class LocalSource:
    """A file, or all files of a directory in order of their relative paths.

    A .txt file is one document (a big one several: `text.CUT_AT_BLANK_LINE`), elsewhere a row is.
    """

    endless = False

    def __init__(self, path: Path, text_column: str, memo: Memo) -> None:
        self._path = path
        self._text_column = text_column
        self._memo = memo
        self.name = path.name or str(path)
        self.label = path.name.split(".")[0] or "local"

    @property
    def size_bytes(self) -> int | None:
        """None where compression hides it."""
        if any(_suffix(file) in (".jsonl.gz", ".parquet") for file in self._files):
            return None
        return sum(file.stat().st_size for file in self._files)

    def identity(self) -> dict[str, Any]:
        try:
            contents = [[_suffix(file), file_sha256(file, self._memo)] for file in self._files]
        except OSError as error:
            raise _unreadable(error) from error
        key: dict[str, Any] = {"kind": "local", "files": hash_of(contents)}
        if any(suffix != ".txt" for suffix, _ in contents):
            key["text_column"] = self._text_column
        return key

    def documents(self, repairs: Repairs) -> Iterator[str]:
        usable = 0
        for file in self._files:
            try:
                before = stat_signature(file)
                for text, place in self._texts(file, repairs):
                    if (document := clean(text, place, repairs)) is not None:
                        usable += 1
                        yield document
                changed = stat_signature(file) != before
            except (OSError, EOFError, zlib.error) as error:  # gzip: torn or not gzip at all
                raise _unreadable(error, file) from error
            if changed:
                raise DataError(f"{file}: changed while it was read; run again once it is at rest")
        if not usable:
            found = "; ".join(repairs.lines()) or "its files are empty"
            raise DataError(f"{self._path}: no usable text: {found}")

    @cached_property
    def _files(self) -> list[Path]:
        if self._path.is_file():
            if not self._path.name.endswith(SUFFIXES):
                raise DataError(f"{self._path}: text comes from {', '.join(SUFFIXES)} files")
            return [self._path]
        found = []
        for parent, directories, names in os.walk(self._path):
            directories[:] = [name for name in directories if not name.startswith(".")]
            visible = (name for name in names if not name.startswith("."))
            found += [Path(parent, name) for name in visible if name.endswith(SUFFIXES)]
        if not found:
            raise DataError(f"{self._path}: no {', '.join(SUFFIXES)} file in it")
        return sorted(found, key=lambda file: file.relative_to(self._path).as_posix())

    def _texts(self, file: Path, repairs: Repairs) -> Iterator[tuple[str, str]]:
        """(text, `file:line`) as it stands in the file."""
        name = file.relative_to(self._path).as_posix() if file != self._path else file.name
        match _suffix(file):
            case ".txt":
                with file.open("rb") as lines:
                    for first, raw in cut_into_documents(without_bom(lines, name)):
                        yield decode(raw, name, first, repairs), f"{name}:{first}"
            case ".parquet":
                yield from _parquet_texts(file, name, self._text_column, repairs)
            case suffix:
                with gzip.open(file) if suffix.endswith(".gz") else file.open("rb") as lines:
                    for number, line in enumerate(without_bom(lines, name), 1):
                        place = f"{name}:{number}"
                        text = decode(line, name, number, repairs)
                        if (value := self._value(text, place, repairs)) is not None:
                            yield value, place

    def _value(self, line: str, place: str, repairs: Repairs) -> str | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            repairs.add("line skipped: not JSON", place)
            return None
        if not isinstance(row, dict) or self._text_column not in row:
            keys = ", ".join(list(row)[:_COLUMNS_IN_MESSAGE]) if isinstance(row, dict) else "none"
            repairs.add(f"line skipped: no {self._text_column!r} in it", f"{place}, keys: {keys}")
            return None
        value = row[self._text_column]
        if not isinstance(value, str):
            repairs.add(f"line skipped: {self._text_column!r} is not a string", place)
            return None
        return value


def _parquet_texts(
    file: Path, name: str, column: str, repairs: Repairs
) -> Iterator[tuple[str, str]]:
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
            row = 0
            for batch in table.iter_batches(_PARQUET_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    if isinstance(value, str):
                        yield value, f"{name}, row {row}"
                    else:
                        repairs.add("row skipped: not a string", f"{name}, row {row}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not readable as parquet: {_first_line(error)}") from error


def _suffix(file: Path) -> str:
    return next(suffix for suffix in SUFFIXES[::-1] if file.name.endswith(suffix))


def _unreadable(error: Exception, file: Path | None = None) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(f"{getattr(error, 'filename', None) or file}: cannot be read: {reason}")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
