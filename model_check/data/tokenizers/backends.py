"""Libraries that turn text into ids: `tokenizers` always, with a memory of words where possible; a
faster library where it gives the same ids.

The cache's key does not name the library. So a faster one is used only after it gave the ids of
`tokenizers` for probe texts. Texts with a character that it classifies otherwise go to `tokenizers`
(`characters`), and samples of the whole text are compared.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal

import numpy as np

from model_check.data.tokenizers.characters import Characters, Divided, Encode, Ids, revealing
from model_check.data.tokenizers.chunks import GPT_2, cut_for, has_windows, windows
from model_check.data.tokenizers.tokenizer import TextTokenizer, byte_letters
from model_check.data.tokenizers.word_memo import WordMemo
from model_check.errors import DataError
from model_check.utils.words import Say

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
    has_memo: bool = False


def choose_backend(name: BackendName, tokenizer: TextTokenizer) -> Backend:
    """`auto` takes the fastest that is installed and gives the same ids. Raises DataError when a
    backend that was asked for by name is missing or gives others."""
    if name == "tokenizers":
        return _tokenizers(tokenizer, "as asked")
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
    """`tokenizers` itself. Its ids are Python lists, which array() reads four times as fast as
    numpy."""
    return lambda texts: [np.asarray(array("I", ids)) for ids in tokenizer.encode(texts)]


class CheckedEncoder:
    """Encodes with a backend and compares samples with `tokenizers`."""

    def __init__(self, backend: Backend, tokenizer: TextTokenizer, say: Say) -> None:
        self._backend = backend
        self._encode = backend.encode
        self._exact = plain(tokenizer)
        self._say = say
        self._compares = backend.name != "tokenizers" or backend.has_memo

    def encode(self, texts: Sequence[str], is_first: bool = True) -> list[Ids]:
        """The ids of each text. `is_first`: the batch is the text's first, of which more is
        compared. Where ids differ, a word memo is given up, and a line says so; with another
        library DataError is raised."""
        each = self._encode(texts)
        if self._compares and (sample := self._difference(texts, each, is_first)) is not None:
            self._give_up(sample)
            return self._encode(texts)
        return each

    def _difference(self, texts: Sequence[str], each: list[Ids], is_first: bool) -> str | None:
        """The first sample for which `tokenizers` gives other ids."""
        for number, sample in _samples(texts, is_first):
            whole = len(sample) == len(texts[number])
            given = each[number] if whole else self._encode([sample])[0]
            if not _same(given, self._exact([sample])[0]):
                return sample
        return None

    def _give_up(self, sample: str) -> None:
        name = "the word memo" if self._backend.has_memo else self._backend.name
        problem = f"{name} gives other ids than tokenizers for a text that begins {sample[:40]!r}"
        if not self._backend.has_memo:
            raise DataError(f"{problem}; set data.tokenizer_backend=tokenizers")
        self._say(f"data: {problem}: tokenizing without it")
        self._encode, self._compares = self._exact, False


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
    """With a word memo, where that is possible."""
    try:
        encode = _word_memo(tokenizer)
    except UnfitError as error:
        return Backend("tokenizers", f"tokenizers ({note}; a word memo {error})", plain(tokenizer))
    return Backend("tokenizers", f"tokenizers with a word memo ({note})", encode, has_memo=True)


def _word_memo(tokenizer: TextTokenizer) -> Encode:
    """Raises UnfitError."""
    document = json.loads(tokenizer.to_json())
    _must_be_words_alone(document, "BPE", "WordPiece")
    cut = cut_for(_pattern(_without_second_split(document)))
    if cut is None:
        raise UnfitError("knows no such pre-tokenizer")
    _must_agree(WordMemo(cut, tokenizer.encode, max_new=1.0).encode, tokenizer)
    return WordMemo(cut, tokenizer.encode).encode


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
        if not _of_library(error):
            raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnfitError(f"cannot take this tokenizer: {first_line}") from error
    divided = Divided(encode, _exact(tokenizer), characters, _parts(tokenizer))
    why = f"{name} {version}: the same ids as tokenizers on a probe text"
    return Backend(name, why, divided.encode)


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
            if not _of_library(error):
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


def _exact(tokenizer: TextTokenizer) -> Encode:
    """`tokenizers`, as fast as possible; made when the first text comes."""

    @cache
    def backend() -> Backend:
        return _tokenizers(tokenizer, "")

    return lambda texts: backend().encode(texts)


def _parts(tokenizer: TextTokenizer) -> Callable[[str], Iterable[str]]:
    """Cuts a long text into windows, where they are sound."""
    try:
        if has_windows(_pattern(json.loads(tokenizer.to_json()))):
            return windows
    except UnfitError:
        pass
    return lambda text: [text]


def _must_agree(
    encode: Encode, tokenizer: TextTokenizer, characters: Characters | None = None
) -> None:
    """Compares the probe texts, except those with characters in dispute. Raises UnfitError."""
    texts = _probe_texts(tokenizer)
    same = map(_same, encode(texts), plain(tokenizer)(texts))
    differ = [text for text, equal in zip(texts, same, strict=True) if not equal]
    if characters is not None:
        differ = [text for text in differ if not characters.in_dispute(text)]
    if differ:
        raise UnfitError(f"gives other ids for a probe text that begins {differ[0][:20]!r}")


def _of_library(error: BaseException) -> bool:
    """A Rust panic is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


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
    return lambda texts: [
        encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        for text in texts
    ]


_FASTER: dict[BackendName, Build] = {"gigatoken": _gigatoken, "tiktoken": _tiktoken}
"""Fastest first."""


def _must_be_words_alone(document: dict[str, Any], *models: str) -> None:
    """Raises UnfitError unless the ids of a text are those of its pre-tokens, each by itself."""
    model = document.get("model", {})
    changes = model.get("dropout") or document.get("normalizer") is not None
    if model.get("type") not in models or changes:
        needed = " or ".join(models)
        raise UnfitError(f"needs a byte-level {needed} without a normalizer and without dropout")
    if any(not token["special"] for token in document.get("added_tokens", [])):
        raise UnfitError("has no added tokens that are not special")


def _ranks(document: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes -> id. tiktoken assumes that ids ascend in the order of the merges. Raises
    UnfitError."""
    _must_be_words_alone(document, "BPE")
    added = {token["content"] for token in document.get("added_tokens", [])}
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {
        bytes(byte_of[letter] for letter in token): number
        for token, number in document["model"]["vocab"].items()
        if token not in added
    }


def _without_second_split(document: dict[str, Any]) -> dict[str, Any]:
    """Without a second Split, which only sees single words: the first one cuts the text."""
    match document.get("pre_tokenizer"):
        case {
            "type": "Sequence",
            "pretokenizers": [{"type": "ByteLevel"} as first, {"type": "Split"}],
        }:
            return {**document, "pre_tokenizer": first}
        case _:
            return document


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
