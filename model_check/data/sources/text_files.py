"""The text files of a directory, and the files that are left out. Opens none of them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_check.config.dataset import TEXT
from model_check.data.sources.file_piece import format_of, plain_suffix, read_errors, suffix_of
from model_check.errors import DataError
from model_check.utils.words import printable

FORMATS = f"{', '.join(TEXT)}, .jsonl (all also .gz, .zst), .parquet"
_OF_ROWS = ".jsonl (also .gz, .zst), .parquet"
_BESIDE_ROWS = ".txt, .jsonl (both also .gz, .zst), .parquet beside rows"
_ROWS = (".jsonl", ".parquet")
_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class TextFiles:
    """In order of their relative paths. Hidden files and those in hidden directories are in neither
    list."""

    directory: Path
    texts: Sequence[Path]
    others: Sequence[Path]
    """Of none of `formats`."""
    formats: str = FORMATS

    def left_out(self) -> str | None:
        """A line about files without text; None: there are none. Raises OSError."""
        empty = [file for file in self.texts if file.is_file() and not file.stat().st_size]
        groups = ((self.others, f"not read, only {self.formats}"), (empty, "empty"))
        parts = [
            f"{len(files)} file{'s' if len(files) > 1 else ''} {why}: {self.names(files)}"
            for files, why in groups
            if files
        ]
        return f"{self.directory}: {'; '.join(parts)}" if parts else None

    def names(self, files: Sequence[Path]) -> str:
        """The first names, and how many more there are."""
        names = [printable(_relative(file, self.directory)) for file in files]
        more = len(names) - _NAMES_IN_MESSAGE
        return ", ".join(names[:_NAMES_IN_MESSAGE]) + (f" (+{more} more)" if more > 0 else "")


def text_files(
    directory: Path, without: Sequence[Path] = (), *, rows_only: bool = False
) -> TextFiles:
    """All files below `directory` except those in `without`, which may be files or directories.
    `rows_only`: running text is left out. Beside rows, .txt alone is text: a README.md tells of
    them. Raises DataError where a directory cannot be listed."""
    found = list(files_below(directory, without))
    has_rows = any(format_of(file) in _ROWS for file in found)
    formats = _OF_ROWS if rows_only else _BESIDE_ROWS if has_rows else FORMATS

    def is_read(file: Path) -> bool:
        if format_of(file) in _ROWS:
            return True
        is_text = suffix_of(file) is not None and not rows_only
        return is_text and not (has_rows and plain_suffix(file) != ".txt")

    texts = [file for file in found if is_read(file)]
    others = [file for file in found if not is_read(file)]
    return TextFiles(directory, _sorted(texts, directory), _sorted(others, directory), formats)


def nothing_to_read(files: TextFiles) -> DataError:
    there = files.names(files.others)
    found = f"; there are: {there}" if there else "; it is empty"
    return DataError(f"{files.directory}: no {files.formats} file in it{found}")


def files_below(directory: Path, without: Sequence[Path] = ()) -> Iterator[Path]:
    """As `text_files` has them, in any order."""
    left_out = [os.path.realpath(path) for path in without]
    # A directory that cannot be listed must not look empty.
    with read_errors():
        for file in _files_below(directory):
            if not (left_out and _is_in(os.path.realpath(file), left_out)):
                yield file


def _files_below(directory: Path) -> Iterator[Path]:
    """Each real directory once, so that links neither make a circle nor repeat a text. Directories
    themselves come before those that links lead to."""
    known = set[tuple[int, int]]()
    waiting = [(False, directory)]
    while waiting:
        waiting.sort(reverse=True)
        _, place = waiting.pop()
        entries = sorted(place.iterdir())
        st = place.stat()
        if (st.st_dev, st.st_ino) in known:
            continue
        known.add((st.st_dev, st.st_ino))
        for path in entries:
            if path.name.startswith("."):
                continue
            if path.is_dir():
                waiting.append((path.is_symlink(), path))
            else:
                yield path


def _sorted(files: list[Path], directory: Path) -> list[Path]:
    """Sorted as if all suffixes were in lower case, since their case does not change the text."""
    return sorted(files, key=lambda file: _with_small_suffix(_relative(file, directory)))


def _with_small_suffix(name: str) -> str:
    suffix = suffix_of(Path(name)) or ""
    return name[: len(name) - len(suffix)] + suffix


def _relative(file: Path, directory: Path) -> str:
    # relative_to() takes ten times as long, and there may be many files.
    return str(file).removeprefix(f"{directory}{os.sep}")


def _is_in(file: str, places: Sequence[str]) -> bool:
    return any(file == place or file.startswith(f"{place}{os.sep}") for place in places)
