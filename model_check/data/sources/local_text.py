"""Text from a file or a directory of this machine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.data.cache.memo import Memo, file_sha256, stat_signature
from model_check.data.read.manifest import hash_of
from model_check.data.sources.file_piece import (
    FilePiece,
    format_of,
    is_packed,
    pieces_of,
    suffix_of,
    unreadable,
)
from model_check.data.sources.rows import EVERY_ROW, RowRule
from model_check.data.sources.source import nothing_usable
from model_check.data.sources.text import Repairs
from model_check.data.sources.text_files import FORMATS, TextFiles, nothing_to_read, text_files
from model_check.errors import DataError
from model_check.utils.words import printable


class LocalSource:
    """A file, or all files of a directory in order of their relative paths.

    A .txt file is one document (a big one several: `text.CUT_AT_BLANK_LINE`), elsewhere a row is.
    """

    endless = False

    def __init__(
        self,
        path: Path,
        text_column: str,
        memo: Memo,
        rows: RowRule = EVERY_ROW,
        without: tuple[Path, ...] = (),
    ) -> None:
        """`rows`: which of JSONL and parquet; `without`: files and directories left out."""
        self._path = path
        self._text_column = text_column
        self._memo = memo
        self._rows = rows
        self._without = without
        self._signatures: dict[Path, str] = {}
        only = rows.only
        self.name = printable(path.name or str(path)) + (f", {only}" if only else "")
        self.label = (path.name.split(".")[0] or "local") + (f"-{only.text}" if only else "")

    @property
    def size_bytes(self) -> int | None:
        """None where compression hides it."""
        if any(is_packed(file) or format_of(file) == ".parquet" for file in self._files):
            return None
        try:
            return sum(file.stat().st_size for file in self._files)
        except OSError as error:
            raise unreadable(error) from error

    def identity(self) -> dict[str, Any]:
        try:
            contents = [[suffix_of(file), self._content(file)] for file in self._files]
        except OSError as error:
            raise unreadable(error) from error
        key: dict[str, Any] = {"kind": "local", "files": hash_of(contents)}
        if any(format_of(file) != ".txt" for file in self._files):
            key["text_column"] = self._text_column
        if rule := self._rows.identity():
            key["rows"] = rule
        return key

    def left_out(self) -> str | None:
        """A line about files of the directory that give no text, if there are any."""
        try:
            return self._found.told() if self._path.is_dir() else None
        except OSError as error:
            raise unreadable(error) from error

    def documents(self, repairs: Repairs) -> Iterator[str]:
        usable = 0
        for piece in self.pieces():
            for document in piece.documents(repairs):
                usable += 1
                yield document
        if not usable:
            raise nothing_usable(self.name, repairs)

    def pieces(self) -> Iterator[FilePiece]:
        for file in self._files:
            name = file.relative_to(self._path).as_posix() if file != self._path else file.name
            try:
                signature = self._signature(file)
                pieces = pieces_of(file, printable(name), self._text_column, signature)
                yield from (replace(piece, rows=self._rows) for piece in pieces)
            except OSError as error:
                raise unreadable(error, file) from error

    def _content(self, file: Path) -> str:
        self._signature(file)  # before it is hashed: what changes later is noticed
        return file_sha256(file, self._memo)

    def _signature(self, file: Path) -> str:
        if file not in self._signatures:
            self._signatures[file] = stat_signature(file)
            if not file.is_file():  # a pipe would be waited for
                raise DataError(f"{file}: is no regular file")
        return self._signatures[file]

    @cached_property
    def _files(self) -> list[Path]:
        if self._path.is_file():
            if suffix_of(self._path) is None:
                raise DataError(f"{self._path}: text comes from {FORMATS} files")
            return [self._path]
        if self._path.exists() and not self._path.is_dir():
            raise DataError(f"{self._path}: is no regular file and no directory")
        files = [file for file in self._found.texts if self._may_have_rows(file)]
        if not files:
            raise nothing_to_read(self._found)
        return files

    @cached_property
    def _found(self) -> TextFiles:
        return text_files(self._path, self._without)

    def _may_have_rows(self, file: Path) -> bool:
        return self._rows.only is None or format_of(file) != ".txt"
