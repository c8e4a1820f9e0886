"""Our own lines as a terminal shows them: no wider than it is, with the verdicts in colour."""

import os
import re
from collections.abc import Mapping, Sequence

_LEAST_COLUMNS = 40
"""A terminal that tells less has no size (0), or is too narrow for a table anyway."""
_COLOURS = {
    "PASS": "32",
    **dict.fromkeys(("FAIL", "SUSPECT", "error:"), "1;31"),
    **dict.fromkeys(("INCONCLUSIVE", "STOPPED", "warning:", "DRILL:"), "33"),
}
_WORD = re.compile(rf"(?<!\S)({'|'.join(map(re.escape, _COLOURS))})(?![\w-])")


def has_colours(fd: int, environ: Mapping[str, str]) -> bool:
    """Only a terminal has; https://no-color.org says how a person asks for none."""
    return os.isatty(fd) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def wrapped(lines: Sequence[str], fd: int, prefix: str) -> list[str]:
    """Lines that fit after `prefix` on the terminal `fd`; unchanged where it is none. A path is
    never broken: it may run over, alone on its line."""
    try:
        width = max(_LEAST_COLUMNS, os.get_terminal_size(fd).columns) - len(prefix)
    except OSError:
        return list(lines)
    return [piece for line in lines for piece in _pieces(line, width)]


def coloured(line: str) -> str:
    return _WORD.sub(lambda match: f"\x1b[{_COLOURS[match[1]]}m{match[1]}\x1b[0m", line)


def _pieces(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    import textwrap  # most lines fit

    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
