"""Parts of messages."""

from collections.abc import Callable, Sequence

from model_check.utils.secrets import masked

Say = Callable[[str], None]
"""Takes one line for people."""
_NUM_NAMED = 4


def first_line(error: BaseException) -> str:
    """The first line of the error's text that is not blank; the error's class where there is
    none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def few(names: Sequence[str]) -> str:
    """`a, b, c, d and 7 more`."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(names[:_NUM_NAMED])}{more}"


def printable(name: str) -> str:
    """A name from a user's data, escaped for one line and for JSON: a file name can hold bytes that
    are not text, a key of JSON can hold line ends and lone surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def printable_lines(text: str) -> str:
    """A message for a terminal. Secrets are masked. The rest is escaped: another user may have
    written names and manifests, and their escape sequences must not move the cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in masked(text))
