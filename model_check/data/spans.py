"""Where a file can be cut so that its parts are read on their own, by any number of workers: byte
ranges that begin and end on borders of documents. They depend on the content alone."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from model_check.data.text import CUT_AT_BLANK_LINE, CUT_AT_LINE_END

Mapped = mmap.mmap | bytes

PIECE_BYTES = 2 << 20
"""A worker's portion: a second of work at the slowest, small beside any memory."""


class Span(NamedTuple):
    """Bytes [start, end) of a file; `first_line` counts from 1."""

    start: int
    end: int
    first_line: int


def line_spans(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
    """Spans of whole lines, each of at least `piece_bytes` but the last. Raises OSError."""
    with _mapped(path) as data:
        start, line = 0, 1
        while start < len(data):
            end = _after_line(data, start + piece_bytes - 1)
            yield Span(start, end, line)
            line += _lines_in(data, start, end)
            start = end


def document_spans(path: Path) -> Iterator[Span]:
    """A span for each document into which `text.cut_into_documents` cuts the file. OSError."""
    with _mapped(path) as data:
        start, line = 0, 1
        while start < len(data):
            end = _document_end(data, start)
            yield Span(start, end, line)
            line += _lines_in(data, start, end)
            start = end


def _document_end(data: Mapped, start: int) -> int:
    """Only the lines past the first MiB are looked at, up to the first blank one."""
    end = start + CUT_AT_BLANK_LINE - 1
    begin = data.rfind(b"\n", start, end) + 1 or start
    while begin < len(data):
        end = _after_line(data, max(begin, end))
        if end - start >= CUT_AT_LINE_END or not data[begin:end].strip():
            return end
        begin = end
    return len(data)


def _after_line(data: Mapped, position: int) -> int:
    found = data.find(b"\n", position)
    return len(data) if found < 0 else found + 1


def _lines_in(data: Mapped, start: int, end: int) -> int:
    return data[start:end].count(b"\n")


@contextmanager
def _mapped(path: Path) -> Iterator[Mapped]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""  # an empty file cannot be mapped
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
