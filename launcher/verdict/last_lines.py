"""The last lines of a worker: what is kept of its output, and what is quoted of that. Pure."""

import re
from collections.abc import Sequence

CUT = "..."
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


def last_lines(lines: Sequence[str], num: int) -> tuple[str, ...]:
    """The last `num`. A block about a NaN may be longer: its title then comes first, and CUT."""
    first = max(0, len(lines) - num)
    title = next((line for line in reversed(lines[:first]) if _is_title(line)), None)
    if title is None or num < 3 or any(map(_is_title, lines[first:])):
        return tuple(lines[first:])
    return (title, CUT, *lines[first + 2 :])


def last_words(lines: Sequence[str]) -> str:
    """The last line that says something; empty: there is none."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def without_numbers(text: str) -> str:
    """A GPU, a size, an address, a time differ between workers that fail alike."""
    return _NUMBER.sub("#", text)


def _is_title(line: str) -> bool:
    """`NaN GRADIENT DETECTED [GPU 6]` (model_check/forensics/report.py)."""
    return " DETECTED [" in line and line.startswith(("NaN", "Inf", "-Inf"))
