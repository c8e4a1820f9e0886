"""Text from a file or a directory of this machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from model_check.data.cache.memo import Memo
from model_check.data.sources.documents import Document, RowForm, TextColumn
from model_check.data.sources.file_piece import (
    FilePiece,
    format_of,
    pieces_of,
    read_errors,
    suffix_of,
)
from model_check.data.sources.hashed_files import HashedFiles
from model_check.data.sources.rows import EVERY_ROW, RowRule
from model_check.data.sources.text import Repairs
from model_check.data.sources.text_files import FORMATS, TextFiles, nothing_to_read, text_files
from model_check.errors import DataError
from model_check.utils.words import printable


@dataclass
class LocalSource:
    """A file, or all files of a directory in order of their relative paths.

    A file of running text is one document (a big one several: `text.CUT_AT_BLANK_LINE`). In other
    formats a row is one.
    """

    path: Path
    form: RowForm
    """What a row of JSONL and parquet is."""
    memo: Memo
    rows: RowRule = EVERY_ROW
    """Which rows of JSONL and parquet are read."""
    without: tuple[Path, ...] = ()
    """Files and directories that are left out."""
    endless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._hashed = HashedFiles(self.memo)
        name, only = self.path.name, self.rows.only
        self.name = printable(name or str(self.path)) + (f", {only}" if only else "")
        self.label = (name.split(".")[0] or "local") + (f"-{only.value}" if only else "")

    @property
    def size_bytes(self) -> int:
        with read_errors():
            return sum(file.stat().st_size for file in self._files)

    def identity(self) -> dict[str, Any]:
        with read_errors():
            suffixes = [suffix_of(file) for file in self._files]
            contents = self._hashed.contents(self._files, suffixes)
            key: dict[str, Any] = {"kind": "local", "files": contents}
        if any(format_of(file) != ".txt" for file in self._files):
            key |= self.form.identity()
        if rule := self.rows.identity():
            key["rows"] = rule
        return key

    def left_out(self) -> str | None:
        """A line about files of the directory that have no text, if there are any."""
        with read_errors():
            return self._found.left_out() if self.path.is_dir() else None

    def documents(self, repairs: Repairs) -> Iterator[Document]:
        for piece in self.pieces():
            yield from piece.documents(repairs)

    def pieces(self) -> Iterator[FilePiece]:
        for file in self._files:
            name = file.relative_to(self.path).as_posix() if file != self.path else file.name
            with read_errors(file):
                signature = self._hashed.signature(file)
                yield from pieces_of(file, printable(name), self.form, signature, self.rows)

    @cached_property
    def _files(self) -> list[Path]:
        if self.path.is_file():
            if suffix_of(self.path) is None:
                raise DataError(f"{self.path}: text comes from {FORMATS} files")
            return [self.path]
        if self.path.exists() and not self.path.is_dir():
            raise DataError(f"{self.path}: is no regular file and no directory")
        files = [file for file in self._found.texts if self._may_have_rows(file)]
        if not files:
            raise nothing_to_read(self._found)
        return files

    @cached_property
    def _found(self) -> TextFiles:
        is_text = isinstance(self.form, TextColumn)
        return text_files(self.path, self.without, rows_only=not is_text)

    def _may_have_rows(self, file: Path) -> bool:
        return self.rows.only is None or format_of(file) != ".txt"
