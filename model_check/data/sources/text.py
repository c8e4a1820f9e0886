"""Documents made clean: what training text may contain, and a count of what was repaired or
skipped."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from model_check.errors import DataError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UTF8_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

CUT_AT_BLANK_LINE = 1 << 20
"""A document of a .txt file ends at the first blank line after so many bytes ..."""
CUT_AT_LINE_END = 4 << 20
"""... or at the first line end after so many, so that memory never holds a huge file whole."""


@dataclass
class Repairs:
    """How often each kind of repair was made, and where first."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, place: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.places.setdefault(kind, place)

    def merge(self, later: "Repairs") -> None:
        """Add those of a text that follows this one."""
        for kind, count in later.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            self.places.setdefault(kind, later.places[kind])

    def lines(self) -> list[str]:
        """`3 x invalid UTF-8 replaced (first at notes.txt:12)`, a line for each kind."""
        return [
            f"{count} x {kind} (first at {self.places.get(kind, 'a place not recorded')})"
            for kind, count in self.counts.items()
        ]


def clean(text: str, place: str, repairs: Repairs) -> str | None:
    """The document without what `clean_part` removes; None when nothing is left of it."""
    text = clean_part(text, place, repairs)
    if not text.strip():
        repairs.add("empty document skipped", place)
        return None
    return text


def clean_part(text: str, place: str, repairs: Repairs) -> str:
    """A part of a document without NUL, carriage returns and lone surrogates, which no tokenizer
    takes."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        repairs.add("document with CR line ends made LF", place)
    if "\0" in text:
        text = text.replace("\0", "")
        repairs.add("document with NUL characters removed", place)
    if not text.isascii() and _LONE_SURROGATE.search(text):
        text = _LONE_SURROGATE.sub("\ufffd", text)
        repairs.add("document with lone surrogates replaced", place)
    return text


def decode(raw: bytes, file: str, first_line: int, repairs: Repairs) -> str:
    """`raw` as UTF-8. Other bytes become U+FFFD, and are counted at their line."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        repairs.add("invalid UTF-8 replaced", f"{file}:{line}")
        return raw.decode(errors="replace")


def without_bom(lines: Iterable[bytes], file: str) -> Iterator[bytes]:
    """The lines, without a byte order mark. Raises DataError for UTF-16 and 32."""
    for number, line in enumerate(lines):
        if number == 0:
            if wide := next((_WIDE_BOMS[bom] for bom in _WIDE_BOMS if line.startswith(bom)), None):
                raise DataError(f"{file}: is {wide}; convert it (iconv -f {wide} -t UTF-8)")
            line = line.removeprefix(_UTF8_BOM)
        yield line


def cut_into_documents(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, document): one document, or several of a big file.

    The cuts depend on the content alone, so the tokens do too.
    """
    document: list[bytes] = []
    size, first = 0, 1
    for number, line in enumerate(lines, 1):
        document.append(line)
        size += len(line)
        blank = not line.strip()
        if size >= CUT_AT_LINE_END or (blank and size >= CUT_AT_BLANK_LINE):
            yield first, b"".join(document)
            document, size, first = [], 0, number + 1
    if document:
        yield first, b"".join(document)
