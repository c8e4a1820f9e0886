"""Documents made clean: what training text may contain, and a count of what was repaired or
skipped to get there."""

import re
from collections.abc import Iterable, Iterator

from model_check.errors import DataError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

CUT_AT_BLANK_LINE = 1 << 20
"""A document of a .txt file ends at the first blank line past so many bytes ..."""
CUT_AT_LINE_END = 4 << 20
"""... or at the first line end past so many, so that a huge file never lies in memory whole."""


class Repairs:
    """How often each repair was made, and where first."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, kind: str, place: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._first.setdefault(kind, place)

    def merge(self, later: "Repairs") -> None:
        """Add those of a text that comes after this one."""
        for kind, count in later.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            self._first.setdefault(kind, later._first[kind])

    @property
    def places(self) -> dict[str, str]:
        """Where each kind came first."""
        return dict(self._first)

    @classmethod
    def of(cls, counts: dict[str, int], places: dict[str, str]) -> "Repairs":
        repairs = cls()
        repairs.counts, repairs._first = dict(counts), dict(places)
        return repairs

    def lines(self) -> list[str]:
        """`3 x invalid UTF-8 replaced (first at notes.txt:12)`, a line a kind."""
        return [
            f"{count} x {kind} (first at {self._first.get(kind, 'a place not recorded')})"
            for kind, count in self.counts.items()
        ]


def clean(text: str, place: str, repairs: Repairs) -> str | None:
    """The document without NUL, carriage returns and lone surrogates (which no tokenizer takes);
    None when nothing is left of it."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        repairs.add("document with CR line ends made LF", place)
    if "\0" in text:
        text = text.replace("\0", "")
        repairs.add("document with NUL characters removed", place)
    if not text.isascii() and _LONE_SURROGATE.search(text):
        text = _LONE_SURROGATE.sub("\ufffd", text)
        repairs.add("document with lone surrogates replaced", place)
    if not text.strip():
        repairs.add("empty document skipped", place)
        return None
    return text


def decode(raw: bytes, file: str, first_line: int, repairs: Repairs) -> str:
    """`raw` as UTF-8; bytes that are not become U+FFFD and are counted at their line."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        repairs.add("invalid UTF-8 replaced", f"{file}:{line}")
        return raw.decode(errors="replace")


def without_bom(lines: Iterable[bytes], file: str) -> Iterator[bytes]:
    """The lines, the first one without a byte order mark. Raises DataError for UTF-16."""
    for number, line in enumerate(lines):
        if number == 0:
            if line.startswith(_UTF16_BOMS):
                raise DataError(f"{file}: is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)")
            line = line.removeprefix(_UTF8_BOM)
        yield line


def cut_into_documents(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, document): one document, or several of a big file.

    Where a cut lies depends on the content alone, so the tokens do too.
    """
    held: list[bytes] = []
    size, first = 0, 1
    for number, line in enumerate(lines, 1):
        held.append(line)
        size += len(line)
        blank = not line.strip()
        if size >= CUT_AT_LINE_END or (blank and size >= CUT_AT_BLANK_LINE):
            yield first, b"".join(held)
            held, size, first = [], 0, number + 1
    if held:
        yield first, b"".join(held)
