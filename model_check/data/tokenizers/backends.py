"""Libraries that turn text into ids: `tokenizers` always, a faster one where it gives the same ids.

The cache's key does not name the library. So a faster one is used only after it gave the ids of
`tokenizers` for probe texts. Texts with a character that it classifies otherwise go to `tokenizers`
(`characters`), and samples of the whole text are compared.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal

import numpy as np

from model_check.data.tokenizers.characters import (
    Characters,
    Divided,
    Encode,
    Ids,
    Parts,
    by_parts,
    revealing,
)
from model_check.data.tokenizers.patterns import GPT_2, has_windows, windows
from model_check.data.tokenizers.tokenizer import (
    TextTokenizer,
    byte_letters,
    is_of_library,
    library_failures,
)
from model_check.errors import DataError
from model_check.utils.words import first_line

BackendName = Literal["auto", "tokenizers", "gigatoken", "tiktoken"]
Build = Callable[[TextTokenizer], Encode]
"""Raises the library's errors, UnfitError, or ImportError."""

_COMPARED_FIRST = 1 << 16
"""Characters of a text's first batch that are tokenized twice: 30 ms ..."""
_COMPARED_LATER = 1 << 8
"""... and of every later one: 1 to 2 % of a preparation with the fastest backend."""


class UnfitError(Exception):
    """A backend cannot do what this tokenizer does; the text says why."""


@dataclass(frozen=True)
class Backend:
    """A way to encode that gave the right ids for the probe texts."""

    name: BackendName
    why: str
    """For people: what was chosen, and why the others were not."""
    encode: Encode


def choose_backend(name: BackendName, tokenizer: TextTokenizer) -> Backend:
    """`auto` takes the fastest that is installed and gives the same ids. Raises DataError when a
    backend that was asked for by name is missing or gives others."""
    if name == "tokenizers":
        return _tokenizers(tokenizer, "as asked")
    if tokenizer.words is not None and name == "auto":
        return _tokenizers(tokenizer, "a vocabulary of words")
    refused = []
    for candidate in _FASTER if name == "auto" else (name,):
        try:
            return _tried(candidate, tokenizer)
        except UnfitError as error:
            if name != "auto":
                raise DataError(
                    f"data.tokenizer_backend = {name!r}: {error}; take auto or tokenizers"
                ) from error
            refused.append(f"{candidate} {error}")
    return _tokenizers(tokenizer, "; ".join(refused))


def plain(tokenizer: TextTokenizer) -> Encode:
    """`tokenizers` itself."""
    return lambda texts: [_array(ids) for ids in tokenizer.encode(texts)]


def _array(ids: list[int]) -> Ids:
    """array() reads Python lists four times as fast as numpy."""
    return np.asarray(array("I", ids))


class CheckedEncoder:
    """Encodes with a backend and compares samples with `tokenizers`."""

    def __init__(self, backend: Backend, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = backend
        self._exact = plain(tokenizer)

    def encode(self, texts: Sequence[str], is_first: bool = True) -> list[Ids]:
        """The ids of each text. `is_first`: the batch is the text's first, of which more is
        compared. Raises DataError where `tokenizers` gives other ids."""
        each = self._ids(texts)
        if self._backend.name != "tokenizers":
            self._compare(texts, each, is_first)
        return each

    def _ids(self, texts: Sequence[str]) -> list[Ids]:
        """Raises DataError."""
        name = self._backend.name
        cure = "" if name == "tokenizers" else " (set data.tokenizer_backend=tokenizers)"
        with library_failures(f"{name} fails on a text{cure}"):
            return self._backend.encode(texts)

    def _compare(self, texts: Sequence[str], each: list[Ids], is_first: bool) -> None:
        for number, sample in _samples(texts, is_first):
            whole = len(sample) == len(texts[number])
            given = each[number] if whole else self._ids([sample])[0]
            if not _same(given, self._exact([sample])[0]):
                raise DataError(
                    f"{self._backend.name} gives other ids than tokenizers for a text that begins "
                    f"{sample[:40]!r}; set data.tokenizer_backend=tokenizers"
                )


def _samples(texts: Sequence[str], is_first: bool) -> Iterator[tuple[int, str]]:
    """(number of the text, all or a part of it): the beginning of the first batch, and of others
    from a place that depends on their texts alone."""
    start, left = (0, _COMPARED_FIRST) if is_first else (sum(map(len, texts)), _COMPARED_LATER)
    for number in range(start, start + len(texts)):
        number %= len(texts)
        text = texts[number]
        offset = start % max(1, len(text) - left + 1)
        yield number, text[offset : offset + left]
        left -= len(text)
        if left <= 0:
            return


def _tokenizers(tokenizer: TextTokenizer, note: str) -> Backend:
    exact, parts = plain(tokenizer), _parts(tokenizer)
    return Backend(
        "tokenizers", f"tokenizers ({note})", lambda texts: by_parts(exact, texts, parts)
    )


def _tried(name: BackendName, tokenizer: TextTokenizer) -> Backend:
    """Raises UnfitError."""
    try:
        encode = _FASTER[name](tokenizer)
        version = metadata.version(name)
        characters = _characters(_FASTER[name], tokenizer)
        _must_agree(encode, tokenizer, characters)
    except UnfitError:
        raise
    except ImportError as error:
        raise UnfitError("is not installed") from error
    except BaseException as error:
        # Any error of the library, even a Rust panic, only means that it is not used.
        if not is_of_library(error):
            raise
        raise UnfitError(f"cannot take this tokenizer: {first_line(error)}") from error
    divided = Divided(encode, plain(tokenizer), characters, _parts(tokenizer))
    return Backend(name, f"{name} {version}", divided.encode)


def _characters(build: Build, tokenizer: TextTokenizer) -> Characters:
    """The characters on which the library and `tokenizers` agree. Raises UnfitError."""
    if not _normalizes_plainly(json.loads(tokenizer.to_json())["normalizer"]):
        raise UnfitError("needs a tokenizer whose normalizer follows no table of Unicode")

    @cache
    def both() -> tuple[Encode, Encode]:
        tried = revealing(tokenizer)
        return build(tried), plain(tried)

    def agree(texts: Sequence[str]) -> list[bool]:
        try:
            # Not made before it is asked for: 40 ms.
            fast, exact = both()
        except BaseException as error:
            if not is_of_library(error):
                raise
            # They cannot be tried, so all such texts go to `tokenizers`.
            return [False] * len(texts)
        return list(map(_same, fast(texts), exact(texts)))

    return Characters(agree)


def _normalizes_plainly(normalizer: dict[str, Any] | None) -> bool:
    """Normalizers of composition, case and width work on several characters together, so trying
    each character is not enough."""
    match normalizer:
        case None | {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": _}}:
            return True
        case {"type": "Sequence", "normalizers": list(several)}:
            return all(map(_normalizes_plainly, several))
        case _:
            return False


def _parts(tokenizer: TextTokenizer) -> Parts:
    """Cuts a long text into windows, where they are sound."""
    document = json.loads(tokenizer.to_json())
    match document.get("pre_tokenizer"):
        case {"pretokenizers": [{"type": "ByteLevel"} as first, {"type": "Split"}]}:
            # The second one, as our WordPiece has it, only sees single words.
            document["pre_tokenizer"] = first
    with suppress(UnfitError):
        if has_windows(_pattern(document)):
            return windows
    return lambda text: [text]


def _must_agree(encode: Encode, tokenizer: TextTokenizer, characters: Characters) -> None:
    """Compares the probe texts, except those with characters in dispute. Raises UnfitError."""
    texts = _probe_texts(tokenizer)
    for text, given, right in zip(texts, encode(texts), plain(tokenizer)(texts), strict=True):
        if not _same(given, right) and not characters.in_dispute(text):
            raise UnfitError(f"gives other ids for a probe text that begins {text[:20]!r}")


def _gigatoken(tokenizer: TextTokenizer) -> Encode:
    import gigatoken

    document = json.loads(tokenizer.to_json())
    # The spelling of a special token in a text is text, so gigatoken must not know them.
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
    # encode_to_numpy, which looks for special tokens, takes a third longer.
    return lambda texts: [_array(encoding.encode_ordinary(text)) for text in texts]


_FASTER: dict[BackendName, Build] = {"gigatoken": _gigatoken, "tiktoken": _tiktoken}
"""Fastest first."""


def _ranks(document: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes -> id. tiktoken assumes that ids ascend in the order of the merges, and that the
    ids of a text are those of its words, each by itself. Raises UnfitError."""
    model = document.get("model", {})
    changes = model.get("dropout") or document.get("normalizer") is not None
    if model.get("type") != "BPE" or changes:
        raise UnfitError("needs a byte-level BPE without a normalizer and without dropout")
    if any(not token["special"] for token in document.get("added_tokens", [])):
        raise UnfitError("has no added tokens that are not special")
    added = {token["content"] for token in document.get("added_tokens", [])}
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {
        bytes(byte_of[letter] for letter in token): number
        for token, number in document["model"]["vocab"].items()
        if token not in added
    }


def _pattern(document: dict[str, Any]) -> str:
    """The regular expression that splits a text into words. Raises UnfitError."""
    match document.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT_2
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


def _probe_texts(tokenizer: TextTokenizer) -> list[str]:
    """Texts on which tokenizers disagree, and the spelling of every added token."""
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
