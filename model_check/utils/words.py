"""Parts of messages."""

from collections.abc import Sequence

_NUM_NAMED = 4


def first_line(error: BaseException) -> str:
    """Of its text; its class where it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def few(names: Sequence[str]) -> str:
    """`a, b, c, d and 7 more`."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(names[:_NUM_NAMED])}{more}"


def printable(name: str) -> str:
    """A name that somebody's data has, fit for one line and for JSON: file names can hold bytes
    that are no text, keys of JSON line ends and lone surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def printable_lines(text: str) -> str:
    """A message, fit for a terminal: names and manifests of a shared cache may be another user's,
    and no escape in them moves the cursor."""
    return "\n".join(map(printable, text.split("\n")))
