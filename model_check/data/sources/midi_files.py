"""A folder of MIDI files as a source of pieces. What reads music is loaded where a file is read:
to find what is prepared takes no numpy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from model_check.config.validation import RowsWith
from model_check.data.cache.memo import Memo
from model_check.data.sources.documents import TokenIds
from model_check.data.sources.file_piece import check_unchanged, read_errors, suffix_of
from model_check.data.sources.hashed_files import HashedFiles
from model_check.data.sources.midi_table import Row, read_table
from model_check.data.sources.rows import EVERY_ROW, RowRule
from model_check.data.sources.text import Repairs
from model_check.data.sources.text_files import files_below, text_files
from model_check.errors import DataError
from model_check.utils.words import few, printable

SUFFIXES = (".mid", ".midi")
"""Also in upper case."""
_TEXT = (".txt", ".jsonl", ".parquet")


def is_music(path: Path, without: Sequence[Path] = (), *, beside_text: bool = False) -> bool:
    """Whether `path` is a MIDI file, or a directory with some and without text, but for what
    describes them (README.md, index.html). `beside_text`: with text, too. Raises DataError."""
    if not path.is_dir():
        return _is_midi(path)
    found = False
    for file in files_below(path, without):
        found = found or _is_midi(file)
        if found and beside_text:
            return True
        if not beside_text and (suffix_of(file) or "").startswith(_TEXT):
            return False
    return found


def _is_midi(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIXES)


def encoding_of(memo: Memo) -> str:
    """`midi.encoding` of the installed packages. Raises DataError."""

    def compute() -> str:
        from model_check.data.sources.midi import encoding

        return encoding()

    versions = [_version(name) for name in ("symusic", "miditok")]
    return memo.remember(f"midi {versions}", compute)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class MidiPiece:
    """One file."""

    file: Path
    name: str
    """Relative to the directory that was given: for messages."""
    signature: str
    """The file's `stat_signature` when its content was hashed."""
    num_bytes: int
    bounded: bool = True
    num_bytes_read: None = None

    @property
    def num_bytes_stored(self) -> int:
        return self.num_bytes

    def documents(self, repairs: Repairs) -> Iterator[TokenIds]:
        """One, or none where the file is broken, which is counted. Raises DataError where it is
        not readable, or changed since it was hashed."""
        from model_check.data.sources.midi import MidiError, read_ids

        try:
            ids, num_lost = read_ids(self.file)
        except MidiError as error:
            repairs.add(f"file skipped: {error.kind}", f"{self.name}: {error}")
            return
        finally:
            with read_errors(self.file):
                check_unchanged(self.file, self.signature)
        if num_lost:
            repairs.add("piece without its notes of drums and beyond the piano's keys", self.name)
        yield TokenIds(ids)


@dataclass
class MidiSource:
    """A MIDI file, or all of a directory in order of their relative paths; a file is a document.
    What is no MIDI is not read."""

    path: Path
    memo: Memo
    rows: RowRule = EVERY_ROW
    """Which of them are read, by their rows of the folder's table."""
    without: tuple[Path, ...] = ()
    """Files and directories that are left out."""
    endless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._hashed = HashedFiles(self.memo)
        name, only = self.path.name, self.rows.only
        self.name = printable(name or str(self.path)) + (f", {only}" if only else "")
        self.label = (name.split(".")[0] or "midi") + (f"-{only.value}" if only else "")

    @property
    def size_bytes(self) -> int:
        with read_errors():
            return sum(file.stat().st_size for file in self._files)

    def identity(self) -> dict[str, Any]:
        with read_errors():
            contents = self._hashed.contents(self._files, [".mid"] * len(self._files))
        return {"kind": "midi", "files": contents, "encoding": encoding_of(self.memo)}

    def documents(self, repairs: Repairs) -> Iterator[TokenIds]:
        for piece in self.pieces():
            yield from piece.documents(repairs)

    def pieces(self) -> Iterator[MidiPiece]:
        for file in self._files:
            with read_errors(file):
                signature, num_bytes = self._hashed.signature(file), file.stat().st_size
            yield MidiPiece(file, printable(self._relative(file)), signature, num_bytes)

    @cached_property
    def _files(self) -> list[Path]:
        """Raises DataError."""
        files = self._all
        if self.rows.columns:
            table = read_table(self._directory, list(map(self._relative, files)))
            table.check(self.rows.columns)
            files = [file for file in files if self.rows.keeps(table.row(self._relative(file)))]
            if (only := self.rows.only) is not None and not files:
                raise _nothing_with(only, table.rows, table.path)
        if not files:
            raise DataError(f"{self.path}: all its MIDI files are for validation")
        return files

    @cached_property
    def _all(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        return [file for file in text_files(self.path, self.without).others if _is_midi(file)]

    @property
    def _directory(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def _relative(self, file: Path) -> str:
        return file.relative_to(self._directory).as_posix()


def _nothing_with(only: RowsWith, rows: Mapping[str, Row], table: Path) -> DataError:
    there = sorted({row[only.column] for row in rows.values()})
    return DataError(
        f"data.validation: {only.column}:{only.value}: no MIDI file has it in {table}, or an "
        f"earlier split has them all (there are: {few(list(map(printable, there)))})"
    )
