"""Masks what looks like a secret in every text of ours, on the terminal and in files. SECURITY.md
lists what is found and what cannot be.

Terminal texts arrive through `words.printable_lines`, the files of a run through `run_dir.write`.
A text must arrive whole: a private key cannot be recognised by one of its lines.
"""

import functools
import os
import re
import sys
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

MASK = "***"
_SHORTEST = 6
"""A shorter value may be part of any word, so it is masked beside its name alone."""

# The end of a name: WANDB_API_KEY, --hf-token, clientSecret, PGPASS, DB_PASS, CLIENT_KEY_DATA; but
# not data.document_tokens, a setting of ours, and not bypass or OLDPWD. The words are tried before
# what must not precede them: this halves the time of a search.
_NAME = (
    r"(?:(?=[acdjkpst])(?:token(?:(?<!document[_-]token)|(?!s))|secret|credential|signature|cookie"
    r"|pass(?:w(?:or)?d|phrase|code|(?<!(?<![a-z])bypass)(?<!(?<![a-z])compass)(?<!encompass)"
    r"(?<!surpass)(?<!lowpass)(?<!highpass)(?<!bandpass))"
    r"|pwd(?<!oldpwd)|key(?:(?<![a-z0-9]key)|(?<=hfkey)|(?<=(?:api|gpg|ssh|ssl|tls)key)"
    r"|(?<=authkey)|(?<=wandbkey)|(?<=(?:access|client|deploy|master|secret|server)key)"
    r"|(?<=(?:account|license|private|signing)key)|(?<=encryptionkey)|(?<=[a-z](?-i:Key)))"
    r"|pw(?:(?<![a-z0-9]pw)|(?<=(?:root|bind)pw)|(?<=dbpw))|auth(?<![a-z0-9]auth)"
    r"|creds?(?<![a-z0-9]creds)(?<![a-z0-9]cred)|pat(?<![a-z0-9]pat)|jwt(?<![a-z0-9]jwt)"
    r"|sig(?<![a-z0-9]sig)|dsn(?<![a-z0-9]dsn))(?:[_-](?:b64|base64|data|json|pem))?)"
)
_ENDS_NAME = re.compile(rf"(?i){_NAME}(?P<many>s)?$", re.ASCII)
# Not of a usage line: `key=...`, `section.key=value`.
_VALUE = (
    r"""(?!\.\.\.|value(?:[\s"')]|$))(?:"{3}[^"]*"{3}|'{3}[^']*'{3}|"(?:\\.|[^"\\])*"|"[^"]*\""""
    r"""|'(?:\\.|[^'\\])*'|'[^']*'|[^\s"'<>]+)"""
)
# A word of a shell, quotes inside it included.
_WORD = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"';|&])+"""

# Before a name that begins its line, in YAML, ini files and scripts; and the end of that line.
_LINE = r"(?m:^)(?P<indent>[ \t]*)(?:-[ \t]+|export[ \t]+)?(?!PASS:)[\w.-]*"
_ENDS = r"[ \t\r]*(?m:$)"
# A block of YAML: it goes on while it is indented.
_BLOCK = r"[|>][-+\d]*[ \t\r]*(?:\n(?:(?P=indent)[ \t]+[^\n]*|[ \t\r]*(?=\n)))+"

# Wherever they stand, with what precedes them in the last group: after their names, by their looks.
# No alternative may read far ahead and then fail: the time must grow with the length alone.
_ANYWHERE = re.compile(
    rf"((?P<line>{_LINE})?(?i:{_NAME}(?:=|s=(?!\d+\b)|s?\\*[\"']\s*:\s*(?=\\*[\"'])"
    r"|[\"']?,?\s+[\"']?value[\"']?\s*:\s*"  # `name: NAME, value: ...`
    rf"|(?(line)s?[ \t]*[:=][ \t]*(?={_BLOCK}|(?!\d{{1,5}}{_ENDS}){_VALUE}{_ENDS})|(?!)))))"
    rf"(?:(?(line){_BLOCK}|(?!))|\\+\"[^\"]*\"|\\+'[^']*'|{_VALUE})"
    r"|(\blogin\s+\S+\s+(?:account\s+\S+\s+)?password\s+)[^\s\"']+"  # .netrc
    # .pgpass; a host of hex digits alone may be an address of IPv6.
    r"|((?<![\w.:*-])(?=[\w.*-]*[g-zG-Z.*])[\w.*-]+:(?:\d{4,5}|\*):[^\s:]+:[^\s:]+:)[^\s\"']+"
    r"""|((?i:\bauthorization["']?\s*[:=]\s*["']?(?:\w+\ +)?|\bbearer\ +(?=\S{16})))[^\s"']+"""
    # URLs: all that stands before the host.
    r"|(://)(?:[^/\s\"']+|[^\s:/@\"']*:(?!\d*/)(?:(?!://)[^\s\"'])*)(?=@)"
    r"|()(?:\b(?:gh[opsur]_|github_pat_|glpat-|dckr_pat_|xox[a-z]-|xapp-|nvapi-|gsk_|hvs\.|ya29\."
    r"|[rs]k_(?:live|test)_|SG\.|AIza|AGE-SECRET-KEY-)[\w.-]{6,}"
    r"|\bhf[-_](?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"
    r"|(?<![\w-])sk-(?=[\w-]*(?:[A-Za-z]\d|\d[A-Za-z]))[\w-]{8,}"
    r"|\b(?:npm_|pypi-|r8_|dop_v1_)\w{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{8,}"
    r"|(?<![\w-])eyJ[\w-]{5,}\.[\w-]+\.[\w-]*)",
    re.ASCII,
)
# In command lines, besides.
_IN_COMMANDS = re.compile(
    rf"((?P<option>(?<![\w.-])--?[\w.-]*)?(?i:{_NAME})(?:\s*[:=]\s*|s\s*[:=]\s*(?!\d+\b)"
    rf"|(?(option)\s+|(?!)))){_WORD}"
    rf"|((?:^|\s)(?:-u|--(?:proxy-)?user)[\s=]*[^\s:=]+:){_WORD}"
    rf"|((?:^|\s)-p\s+)(?!\d{{1,5}}\b|[./]){_WORD}"
    r"|((?:^|\s)-p)(?=[^\s]*\d)(?=[^\s]*[^\d\s:])[^\s\"'.:/-]{6,}",
    re.ASCII,
)

# Where a private key begins and ends, also as a list of words. PuTTY's form and PEM in base64 have
# no end of their own; certificates and public keys in base64 differ by the letters that follow.
_KEY_MARK = re.compile(
    r"-{4,5} ?(?:BEGIN|(?P<end>END))(?:(?:[\s'\",]+[A-Z0-9]+)*?[\s'\",]+PRIVATE[\s'\",]+KEY"
    r"(?:[\s'\",]+BLOCK)?| OpenVPN Static key V1) ?-{4,5}"
    r"|Private-Lines: \d+|LS0tLS1CRUdJTi(?!BDRVJU|BQVUJM)"
)
# The rest of a key beside its only mark: headers, long words, words alone on their lines.
_KEY_BODY = re.compile(
    r"\S*(?:\s++(?:\S{20,}|(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset): [^\n]*"
    r"|\S+(?=[ \t\r]*(?:\n|\Z))))*"
)
_LINE_END = re.compile(r"[\r\n]+|\\+[nr]")
_LONG_WORD = re.compile(r"[^\s\"',]{20,}")


Piece = tuple[str, bool]
"""A part of a text, and whether it is a secret."""


def masked(text: str) -> str:
    """`text` without what looks like a secret, and without the secrets that the command line and
    the environment of this process hold."""
    text = _joined(_around_keys(text))
    for form in _known():
        text = text.replace(form, MASK)
    return _joined(_cut(_ANYWHERE, text))


def masked_argv(argv: Sequence[str]) -> list[str]:
    """The same for a command line: its options tell more (`--wandb-key VALUE`)."""
    return [masked(_joined(_argument(*pair))) for pair in pairwise(("", *_without_keys(argv)))]


def masked_values(value: Any) -> Any:
    """The same for each text in a document of plain types."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {
            masked(key) if isinstance(key, str) else key: _masked_item(key, item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked_values(item) for item in value]
    return value


def _masked_item(key: Any, item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_masked_item(key, each) for each in item]
    # A `key` of our own documents is the name of what was compared.
    is_secret = isinstance(item, str) and key != "key" and _names_a_secret(str(key), item)
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


def _around_keys(text: str) -> Iterator[Piece]:
    """Private keys, from mark to mark. A mark may be missing, as only the last lines of a worker
    are kept and long ones are cut: the key is then what looks like its body beside the other."""
    at, marks = 0, list(_KEY_MARK.finditer(text))
    for mark, following in zip(marks, [*marks, None][1:], strict=True):
        begin, end = mark.span()
        if begin < at:
            continue
        if mark["end"]:
            begin -= _body_length(text[at:begin][::-1])
        elif following and following["end"]:
            end = following.end()
        else:
            end += _body_length(text[end : following.start() if following else None])
        yield text[at:begin], False
        yield text[begin:end], True
        at = end
    yield text[at:], False


def _body_length(text: str) -> int:
    body = _KEY_BODY.match(text)
    return body.end() if body else 0


def _without_keys(argv: Sequence[str]) -> list[str]:
    """A key that a shell has split into words is one only in the whole command line."""
    whole = " ".join(argv)
    hidden = "".join("\0" * len(t) if is_key else t for t, is_key in _around_keys(whole))
    ends = accumulate(len(argument) + 1 for argument in argv)
    parts = (hidden[end - 1 - len(each) : end - 1] for each, end in zip(argv, ends, strict=True))
    return [re.sub("\0+", MASK, part) for part in parts]


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
    """What is a secret wherever it stands, in each form, the longest first."""
    found = set(_of_command_line(tuple(sys.argv[1:])))
    for name, value in os.environ.items():
        if _names_a_secret(name, value):
            found.add(value)
        if any(sign in value for sign in ("://", "=", "\n", "{", "-----")):
            found |= _secrets_in(value)
    parts = {part for value in found for part in _parts(value) if _is_telling(part)}
    return tuple(sorted({form for part in parts for form in _forms(part)}, key=len, reverse=True))


@functools.cache
def _of_command_line(argv: tuple[str, ...]) -> frozenset[str]:
    found = _secrets(_around_keys(" ".join(argv)))
    for before, argument in pairwise(("", *argv)):
        found |= _secrets(_argument(before, argument)) | _secrets_in(argument)
    return frozenset(found)


def _secrets_in(text: str) -> set[str]:
    keys = list(_around_keys(text))
    return _secrets(keys) | _secrets(_cut(_ANYWHERE, _joined(keys)))


def _secrets(pieces: Iterable[Piece]) -> set[str]:
    """Also the password alone of `user:password`."""
    whole = {text.strip("\"'") for text, is_secret in pieces if is_secret}
    return whole | {text.partition(":")[2] for text in whole}


def _parts(value: str) -> Iterator[str]:
    """A secret and what a text may hold of it alone: its lines, and its long words, which a key
    has in place of lines once a shell has joined them."""
    lines = [line.strip(" \t\"'") for line in _LINE_END.split(value)]
    yield from (value.strip(" \t\r\n\"'"), "\n".join(lines), *lines, *_LONG_WORD.findall(value))


def _is_telling(value: str) -> bool:
    return len(value) >= _SHORTEST and value != MASK and not os.path.lexists(value)


def _forms(value: str) -> Iterator[str]:
    """`value` as texts quote it: repr(), JSON, a shell, a URL, base64."""
    import json
    from urllib.parse import quote

    plain = (value, *(write(value)[1:-1] for write in (repr, ascii, json.dumps)))
    for text in plain:
        bare = text.replace("\\'", "'").replace('\\"', '"')
        yield from (text, bare, bare.replace('"', '\\"'))
        yield from (bare.replace("'", each) for each in ("\\'", "'\\''", "'\"'\"'"))
    raw = value.encode(errors="surrogateescape")
    yield from (raw.decode(errors="replace"), quote(raw, safe=""), quote(raw))
    for end in (b"", b"\n"):
        yield b2a_base64(raw + end, newline=False).decode().rstrip("=")
