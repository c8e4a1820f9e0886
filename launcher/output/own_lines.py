"""Our own lines as a terminal shows them: no wider than it is, with the verdicts in colour."""

import os
import re
from collections.abc import Sequence

_LEAST_COLUMNS, _USUAL_COLUMNS = 40, 80
"""A terminal that tells less than the first has no size (0), or is too narrow for any table."""
_COLOURS = {
    "PASS": "32",
    **dict.fromkeys(("FAIL", "SUSPECT", "error:"), "1;31"),
    **dict.fromkeys(("INCONCLUSIVE", "STOPPED", "warning:", "DRILL:"), "33"),
}
_WORD = re.compile(rf"(?<!\S)(?<!\b0 )({'|'.join(map(re.escape, _COLOURS))})(?![\w-])")


def for_terminal(lines: Sequence[str], fd: int, prefix: str) -> Sequence[str]:
    """Lines that fit after `prefix` on the terminal `fd`, in colour unless a person asks for none
    (https://no-color.org); unchanged where it is none. A path is never broken: it may run over,
    alone on its line."""
    try:
        columns = os.get_terminal_size(fd).columns
    except OSError:
        return lines
    width = (columns if columns >= _LEAST_COLUMNS else _USUAL_COLUMNS) - len(prefix)
    pieces = [piece for line in lines for piece in _pieces(line, width)]
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return pieces
    return list(map(_coloured, pieces))


def _coloured(line: str) -> str:
    return _WORD.sub(lambda match: f"\x1b[{_COLOURS[match[1]]}m{match[1]}\x1b[0m", line)


def _pieces(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    import textwrap  # most lines fit

    indent = line[: len(line) - len(line.lstrip())] + "  "
    pieces = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return pieces or [""]  # of blanks alone
