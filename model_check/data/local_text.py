"""Text from a file or a directory of this machine: .txt, .jsonl, .jsonl.gz, .parquet."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.data.file_piece import SUFFIXES, FilePiece, pieces_of, suffix_of, unreadable
from model_check.data.manifest import hash_of
from model_check.data.memo import Memo, file_sha256, stat_signature
from model_check.data.rows import EVERY_ROW, RowRule
from model_check.data.sources import nothing_usable
from model_check.data.text import Repairs, printable
from model_check.errors import DataError


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
        if any(suffix_of(file) in (".jsonl.gz", ".parquet") for file in self._files):
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
        if any(suffix != ".txt" for suffix, _ in contents):
            key["text_column"] = self._text_column
        if rule := self._rows.identity():
            key["rows"] = rule
        return key

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
            if not self._path.name.endswith(SUFFIXES):
                raise DataError(f"{self._path}: text comes from {', '.join(SUFFIXES)} files")
            return [self._path]
        found = []
        for parent, directories, names in os.walk(self._path, onerror=_refuse):
            directories[:] = [name for name in directories if not name.startswith(".")]
            visible = (name for name in names if not name.startswith("."))
            found += [Path(parent, name) for name in visible if name.endswith(SUFFIXES)]
        if self._rows.only is not None:  # a .txt file has no rows
            found = [file for file in found if suffix_of(file) != ".txt"]
        left_out = [path.resolve() for path in self._without]
        found = [file for file in found if not _is_in(file.resolve(), left_out)]
        if not found:
            raise DataError(f"{self._path}: no {', '.join(SUFFIXES)} file in it")
        return sorted(found, key=lambda file: file.relative_to(self._path).as_posix())


def _refuse(error: OSError) -> None:
    """A directory that cannot be listed must not look empty."""
    raise unreadable(error) from error


def _is_in(file: Path, places: list[Path]) -> bool:
    return any(file == place or place in file.parents for place in places)
