"""Parts of messages."""

import re
from collections.abc import Callable, Sequence

# Control characters: C0 but tab, newline and carriage return; DEL; C1, where U+009B starts an
# escape sequence as ESC [ does. And characters that reorder or break a line, or that nobody sees:
# of zero width (but the joiners of emoji and of Persian), tags and their like, fillers.
_CONTROLS = [*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)]
_REORDER = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_UNSEEN = [0xAD, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180E, 0x200B, *range(0x2060, 0x2066), 0x3164]
_UNSEEN += [0xFEFF, 0xFFA0, *range(0xFFF9, 0xFFFC)]
_UNSEEN += [0xE0001, *range(0xE0020, 0xE0080), *range(0xE0100, 0xE01F0)]
_VISIBLE = {c: f"\\x{c:02x}" for c in _CONTROLS}
_VISIBLE |= {c: f"\\u{c:04x}" if c < 1 << 16 else f"\\U{c:08x}" for c in _REORDER + _UNSEEN}
_UNSAFE = re.compile(f"[{''.join(map(chr, _VISIBLE))}]")

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


def escape(text: str) -> str:
    """`text` with everything that could move the cursor, colour or reorder made visible: ESC is
    `\\x1b`."""
    # The search is quick where there is nothing to do, the table where there is much: 64 KiB of NUL
    # take 1.5 ms, with a call for each 41.
    return text.translate(_VISIBLE) if _UNSAFE.search(text) else text


def printable(name: str) -> str:
    """A name from a user's data, escaped for one line and for JSON: a file name can hold bytes that
    are not text, a key of JSON can hold line ends and lone surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def printable_lines(text: str) -> str:
    """A message for a terminal. Secrets are masked. The rest is escaped: another user may have
    written names and manifests, and their escape sequences must not move the cursor."""
    # Its patterns need Python 3.11; a person's own may be older, and asks for other words.
    from model_check.utils.secrets import masked

    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in masked(text))
