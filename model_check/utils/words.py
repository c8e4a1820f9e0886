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
