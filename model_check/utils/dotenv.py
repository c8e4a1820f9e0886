"""A `.env` file of NAME=value lines: read as data, never executed."""

import re
from contextlib import suppress
from pathlib import Path


def value_in(file: Path, name: str) -> str | None:
    """The value of `name`; None: the file has none, or cannot be read."""
    line = re.compile(rf"""^[ \t]*(?:export[ \t]+)?{name}[ \t]*=[ \t]*["']?([^\s"'#]+)""", re.M)
    with suppress(OSError, UnicodeDecodeError):
        if found := line.search(file.read_text()):
            return found[1]
    return None
