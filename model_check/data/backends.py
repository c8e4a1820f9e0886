"""What turns text into ids: `tokenizers` always, a faster library where it gives the same ids.

The cache's key does not know which one it was: a backend is used only after it gave, on a probe
text and on the first of the real text, the ids that `tokenizers` gives.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model_check.data.tokenizer import TextTokenizer
from model_check.errors import DataError

BackendName = Literal["auto", "tokenizers", "gigatoken", "tiktoken"]
Ids = NDArray[np.uint32]
Encode = Callable[[Sequence[str]], list[Ids]]
Build = Callable[[TextTokenizer], Encode]
"""Raises what the library raises, UnfitError, or ImportError."""

_CHECKED_CHARACTERS = 1 << 16
"""So much of the real text is tokenized twice: 30 ms."""
# The pattern of GPT-2, which a ByteLevel pre-tokenizer of `tokenizers` splits by.
_BYTE_LEVEL = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class UnfitError(Exception):
    """A backend that cannot do what this tokenizer does; the text says why."""


@dataclass(frozen=True)
class Backend:
    """A way to encode, tried on the probe text."""

    name: BackendName
    why: str
    """For people: what was chosen, and what was not."""
    encode: Encode
    """The ids of each text, without any special token."""


def choose_backend(wanted: BackendName, tokenizer: TextTokenizer) -> Backend:
    """`auto` takes the fastest that is installed and gives identical ids. Raises DataError when one
    asked for by name cannot be had or disagrees."""
    if wanted == "tokenizers":
        return Backend(wanted, "tokenizers, as asked", plain(tokenizer))
    if wanted != "auto":
        try:
            return _tried(wanted, tokenizer)
        except UnfitError as error:
            raise DataError(
                f"data.tokenizer_backend = {wanted!r}: {error}; take auto or tokenizers"
            ) from error
    refused = []
    for name in _FASTER:
        try:
            return _tried(name, tokenizer)
        except UnfitError as error:
            refused.append(f"{name} {error}")
    return Backend("tokenizers", f"tokenizers ({'; '.join(refused)})", plain(tokenizer))


def plain(tokenizer: TextTokenizer) -> Encode:
    """`tokenizers` itself. Its ids are Python lists: array() takes them four times as fast as
    numpy does."""
    return lambda texts: [np.asarray(array("I", ids)) for ids in tokenizer.encode(texts)]


def checked(backend: Backend, tokenizer: TextTokenizer) -> Encode:
    """`backend`, its first texts compared with what `tokenizers` says. Raises DataError."""
    if backend.name == "tokenizers":
        return backend.encode
    unchecked = _CHECKED_CHARACTERS

    def encode(texts: Sequence[str]) -> list[Ids]:
        nonlocal unchecked
        each = backend.encode(texts)
        for text, ids in zip(texts, each, strict=True):
            if unchecked <= 0:
                break
            unchecked -= len(text)
            if not _same(ids, plain(tokenizer)([text])[0]):
                raise DataError(
                    f"{backend.name} gives other ids than tokenizers for a text that begins "
                    f"{text[:40]!r}; set data.tokenizer_backend=tokenizers"
                )
        return each

    return encode


def _tried(name: BackendName, tokenizer: TextTokenizer) -> Backend:
    """Raises UnfitError."""
    try:
        encode = _FASTER[name](tokenizer)
        version = metadata.version(name)
        texts = _probe_texts(tokenizer)
        same = map(_same, encode(texts), plain(tokenizer)(texts))
        differ = [text for text, equal in zip(texts, same, strict=True) if not equal]
    except UnfitError:
        raise
    except ImportError as error:
        raise UnfitError("is not installed") from error
    except BaseException as error:
        # A Rust panic is no Exception; whatever else a library raises only means: not this one.
        if isinstance(error, KeyboardInterrupt) or not _of_library(error):
            raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnfitError(f"cannot take this tokenizer: {first_line}") from error
    if differ:
        raise UnfitError(f"gives other ids for a probe text that begins {differ[0][:20]!r}")
    return Backend(name, f"{name} {version}: the same ids as tokenizers on a probe text", encode)


def _of_library(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _gigatoken(tokenizer: TextTokenizer) -> Encode:
    import gigatoken

    document = json.loads(tokenizer.to_json())
    # Special tokens spelt in a text are text: it does not know them.
    document["added_tokens"] = [a for a in document.get("added_tokens", []) if not a["special"]]
    encoder = gigatoken.Tokenizer.from_json(json.dumps(document))
    return lambda texts: [encoder.encode(text) for text in texts]


def _tiktoken(tokenizer: TextTokenizer) -> Encode:
    import tiktoken

    document = json.loads(tokenizer.to_json())
    ranks = _ranks(document)
    encoding = tiktoken.Encoding(
        tokenizer.name, pat_str=_pattern(document), mergeable_ranks=ranks, special_tokens={}
    )
    return lambda texts: [
        encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        for text in texts
    ]


_FASTER: dict[BackendName, Build] = {"gigatoken": _gigatoken, "tiktoken": _tiktoken}
"""Fastest first."""


def _ranks(document: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes -> id. Raises UnfitError unless ids ascend in the order of the merges."""
    model = document["model"]
    if model.get("type") != "BPE" or document.get("normalizer") is not None:
        raise UnfitError("needs a byte-level BPE without a normalizer")
    added = {token["content"] for token in document.get("added_tokens", [])}
    if any(not token["special"] for token in document.get("added_tokens", [])):
        raise UnfitError("has no added tokens that are not special")
    letters = _byte_of_letter()
    return {
        bytes(letters[letter] for letter in token): number
        for token, number in model["vocab"].items()
        if token not in added
    }


def _pattern(document: dict[str, Any]) -> str:
    """The regular expression that splits a text into words. Raises UnfitError."""
    match document.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _BYTE_LEVEL
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
        case _:
            raise UnfitError("knows no such pre-tokenizer")


def _byte_of_letter() -> dict[str, int]:
    """How a byte-level vocabulary spells bytes: printable ones as themselves, the others, in order,
    as the letters from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def _probe_texts(tokenizer: TextTokenizer) -> list[str]:
    """What tokenizers disagree about, and the spelling of every token that was added."""
    added = json.loads(tokenizer.to_json()).get("added_tokens", [])
    spelt = " ".join(f"a{token['content']} {token['content']}b" for token in added)
    runs = [mark * count for mark in " \t\n\r\v\xa0\u2003\u200b\u3000" for count in range(1, 9)]
    digits = [str(10**count // 7) for count in range(20)]
    every = "".join(chr(c) for c in range(1, 0x3000, 5) if not 0xD800 <= c <= 0xDFFF)
    return [
        "x".join(runs),
        "\n".join(run + "y" for run in runs) + " \n \n\n",
        " ".join(digits) + ",".join(digits) + "-".join(digits) + "١٢٣٤ Ⅷ ½ ²",
        "I'm we'll THEY'VE don't you're it's 'tis he'd O'Neill 'S 'LL ''' \u2019s don\u2019t",
        "def f(x: int) -> str:\n\treturn f'{x!r:>10}' if x else \"\\\\n\"  # --- TODO ===\n\n}\n",
        "https://example.org/a_b?c=d&e=%20#f <b>bold</b> snake_case camelCase SCREAMING_CASE...!?",
        "Ünïcödé e\u0301 naïve ﬁ Ελληνικά Русский עברית العربية हिन्दी ไทย",
        "中文字符 日本語かな 한국어",
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
        "\ufffd \U0010fffd \ufeff a\u0301\u0302 \u1100\u1161",
        every,
        "a" * 300 + " " + "ab" * 200 + "!" * 100 + "\U0001f600" * 20,
        spelt or "none",
        " ",
        "\n",
    ]


def _same(one: Ids, other: Ids) -> bool:
    return bool(np.array_equal(one, other))
