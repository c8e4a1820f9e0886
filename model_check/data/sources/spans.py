"""Byte ranges of a file that begin and end between documents, so that any number of workers can
read them on their own. They depend on the content alone.

Files are read, never mapped: one that shrinks under a memory map kills the process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from model_check.data.sources.text import CUT_AT_BLANK_LINE, CUT_AT_LINE_END
from model_check.errors import DataError

PIECE_BYTES = 2 << 20
"""A worker's portion: a second of work at most, and little memory."""
LONGEST_LINE = 64 << 20
"""A longer one is not text (endless zeros, a gzip bomb), and would fill the memory."""


class Lines(Protocol):
    """A file, packed or not."""

    def readline(self, size: int, /) -> bytes: ...


class Span(NamedTuple):
    """Bytes [start, end) of a file; `first_line` counts from 1."""

    start: int
    end: int
    first_line: int


def line_spans(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
    """Spans of whole lines, each except the last of at least `piece_bytes`. Raises OSError,
    DataError."""
    with path.open("rb") as file:
        start, line = 0, 1
        while part := file.read(piece_bytes):
            rest = b"" if part.endswith(b"\n") else read_line(file, path)
            end = start + len(part) + len(rest)
            yield Span(start, end, line)
            line += part.count(b"\n") + rest.count(b"\n")
            start = end


def document_spans(path: Path) -> Iterator[Span]:
    """A span for each document into which `text.cut_into_documents` cuts the file. Raises OSError,
    DataError."""
    with path.open("rb") as file:
        start, line = 0, 1
        while head := file.read(CUT_AT_BLANK_LINE - 1):
            size, num_lines = _rest_of_document(file, path, head)
            yield Span(start, start + size, line)
            start, line = start + size, line + num_lines


def _rest_of_document(file: Lines, path: Path, head: bytes) -> tuple[int, int]:
    """(bytes, lines) of the document that begins with `head`. Reads up to its end."""
    size, num_lines = len(head), head.count(b"\n")
    begun = head[head.rfind(b"\n") + 1 :]
    while rest := read_line(file, path):
        size, num_lines = size + len(rest), num_lines + rest.count(b"\n")
        blank = not (begun.strip() or rest.strip())
        if blank or size >= CUT_AT_LINE_END:
            break
        begun = b""
    return size, num_lines


def read_line(file: Lines, path: Path) -> bytes:
    """The next line, its end included; empty at the end of the file. Raises DataError for one that
    is too long for the memory."""
    line = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise DataError(
            f"{path}: a line of more than {LONGEST_LINE >> 20} MiB: this is no text, or it has no "
            "line ends; divide it"
        )
    return line
