"""What looks like a secret, masked in every text of ours: on the terminal and in files. SECURITY.md
says what is found, and what cannot be.

The texts on a terminal come here through `words.printable_lines`, the files of a run through
`run_dir.write`.
"""

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

MASK = "***"
_SHORTEST = 6
"""A shorter value may be part of any word, so it is masked beside its name alone."""

# The end of a name: WANDB_API_KEY, --hf-token, clientSecret, PGPASSWORD, DB_PASS; but not
# data.document_tokens, a setting of ours.
_NAME = (
    r"(?:(?<!document[_-])token|(?<=document[_-])token(?!s)|secret|passw(?:or)?d|passphrase|passcode|credential|signature|cookie|(?:api|access"
    r"|auth|secret|private|license|wandb|hf)key"
    r"|(?<![a-z0-9])(?:key|pass|pwd|pw|auth|creds?|pat|jwt|sig|dsn)|(?<=[a-z])(?-i:Key|Pass|Pwd))"
)
_ENDS_NAME = re.compile(rf"(?i){_NAME}(?P<many>s)?$", re.ASCII)
# Not of a usage line: `key=...`, `section.key=value`.
_VALUE = r"""(?!\.\.\.|value(?:[\s"')]|$))(?:"[^"]*"|'[^']*'|[^\s"'<>]+)"""
# A word of a shell, quotes inside it included.
_WORD = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"';|&])+"""

# Wherever they stand, with what precedes them in group 1: after their names, by their looks.
_ANYWHERE = re.compile(
    rf"((?i:{_NAME}(?:=|s=(?!\d+\b)))){_VALUE}"
    rf"""|((?i:{_NAME}s?)["']\s*:\s*)(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
    r"""|((?i:\bauthorization["']?\s*[:=]\s*["']?(?:\w+\ +)?|\bbearer\ +(?=\S{16})))[^\s"']+"""
    # URLs: all that stands before the host.
    r"|(://)(?:[^/\s\"']+|[^\s:/@\"']*:(?!\d*/)[^\s\"']*)(?=@)"
    r"|()(?:\b(?:gh[opsur]_|github_pat_|glpat-|dckr_pat_|xox[a-z]-|xapp-|nvapi-|gsk_|hvs\.|ya29\."
    r"|[rs]k_(?:live|test)_|SG\.|AIza)[\w.-]{6,}"
    r"|\bhf[-_](?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"
    r"|\bsk-(?=[\w-]*(?:[A-Za-z]\d|\d[A-Za-z]))[\w-]{8,}"
    r"|\b(?:npm_|pypi-|r8_|dop_v1_)\w{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{8,}"
    r"|\beyJ[\w-]{5,}\.[\w-]+\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
    re.ASCII,
)
# In command lines, besides.
_IN_COMMANDS = re.compile(
    rf"((?i:{_NAME}(?:\s*[:=]\s*|s\s*[:=]\s*(?!\d+\b))|--?[\w.-]*{_NAME}\s+)){_WORD}"
    rf"|((?:^|\s)(?:-u|--(?:proxy-)?user)[\s=]*[^\s:=]+:){_WORD}"
    rf"|((?:^|\s)-p\s+)(?!\d{{1,5}}\b|[./]){_WORD}"
    r"|((?:^|\s)-p)(?=[^\s]*\d)(?=[^\s]*[^\d\s:])[^\s\"'.:/-]{6,}",
    re.ASCII,
)


Piece = tuple[str, bool]
"""A part of a text, and whether it is a secret."""


def masked(text: str) -> str:
    """`text` without what looks like a secret, and without the secrets that the command line and
    the environment of this process hold."""
    if known := _known():
        text = _pattern(known).sub(MASK, text)
    return _joined(_cut(_ANYWHERE, text))


def masked_argv(argv: Sequence[str]) -> list[str]:
    """The same for a command line: its options tell more (`--wandb-key VALUE`)."""
    return [masked(_joined(_argument(*pair))) for pair in pairwise(("", *argv))]


def masked_values(value: Any) -> Any:
    """The same for each text in a document of plain types."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {key: _masked_item(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_values(item) for item in value]
    return value


def _masked_item(key: Any, item: Any) -> Any:
    is_secret = isinstance(item, str) and _names_a_secret(str(key), item)
    return MASK if is_secret else masked_values(item)


def _joined(pieces: Iterable[Piece]) -> str:
    return "".join(MASK if is_secret else text for text, is_secret in pieces)


def _cut(pattern: re.Pattern[str], text: str) -> Iterator[Piece]:
    at = 0
    for found in pattern.finditer(text):
        begin = found.end(found.lastindex or 0)
        yield text[at:begin], False
        yield text[begin : found.end()], True
        at = found.end()
    yield text[at:], False


def _argument(before: str, argument: str) -> Iterator[Piece]:
    """An argument of a command line, with the one before it."""
    name, _, value = argument.partition("=")
    if _takes_a_secret(before, argument):
        yield argument, True
    elif value and re.fullmatch(r"[\w.-]+", name) and _names_a_secret(name, value):
        yield f"{name}=", False
        yield value, True
    else:
        yield from _cut(_IN_COMMANDS, argument)


def _takes_a_secret(option: str, value: str) -> bool:
    if option == "-p":  # a password here, a port or a directory there
        return not re.fullmatch(r"\d{1,5}|[./~].*", value)
    if option in ("-u", "--user", "--proxy-user"):
        return ":" in value
    return option.startswith("-") and "=" not in option and _names_a_secret(option, value)


def _names_a_secret(name: str, value: str) -> bool:
    """`max_tokens=5` is a count."""
    found = _ENDS_NAME.search(name)
    return found is not None and not (found["many"] and value.isdigit())


def mask_others() -> None:
    """Mask what packages log in this process (huggingface_hub quotes the URL that it retries), and
    the traceback that ends it."""
    import logging
    import traceback

    make = logging.getLogRecordFactory()

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with suppress(TypeError, ValueError):  # logging itself tells of arguments that do not fit
            record.msg, record.args = masked(record.getMessage()), ()
        return record

    def print_traceback(*error: Any) -> None:
        print(masked("".join(traceback.format_exception(*error))), end="", file=sys.stderr)

    logging.setLogRecordFactory(record_of)
    sys.excepthook = print_traceback


def look_again() -> None:
    """Call it when the environment holds another secret."""
    _known.cache_clear()


@functools.cache
def _known() -> tuple[str, ...]:
    """What is a secret wherever it stands, the longest first."""
    found = set(_of_command_line(tuple(sys.argv[1:])))
    for name, value in os.environ.items():
        if _names_a_secret(name, value):
            found.add(value)
        elif "://" in value:
            found |= _secrets(_cut(_ANYWHERE, value))
    return tuple(sorted(filter(_is_telling, found), key=len, reverse=True))


@functools.cache
def _of_command_line(argv: tuple[str, ...]) -> frozenset[str]:
    found: set[str] = set()
    for pair in pairwise(("", *argv)):
        found |= _secrets(_argument(*pair)) | _secrets(_cut(_ANYWHERE, pair[1]))
    return frozenset(found)


def _secrets(pieces: Iterable[Piece]) -> set[str]:
    """Also the password alone of `user:password`."""
    whole = {text.strip("\"'") for text, is_secret in pieces if is_secret}
    return whole | {text.partition(":")[2] for text in whole}


def _is_telling(value: str) -> bool:
    return len(value) >= _SHORTEST and not os.path.lexists(value)


@functools.lru_cache(maxsize=4)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    # Messages quote a value by repr().
    forms = dict.fromkeys(form for value in values for form in (value, repr(value)[1:-1]))
    return re.compile("|".join(map(re.escape, forms)))
