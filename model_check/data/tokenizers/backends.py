"""What turns text into ids: `tokenizers` always, with a memory of words where that can be; a faster
library where it gives the same ids.

The cache's key does not know which one it was: a backend is used only after it gave, on a probe
text, the ids that `tokenizers` gives; texts with a character that it takes for something else are
left to `tokenizers` (`characters`); and samples of the whole text are compared.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal, Protocol

import numpy as np

from model_check.data.sources.progress import Say
from model_check.data.tokenizers.byte_level import byte_letters
from model_check.data.tokenizers.characters import Characters, telling
from model_check.data.tokenizers.chunks import GPT_2, cut_for, has_windows, windows
from model_check.data.tokenizers.divided import Divided, Encode, Ids
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.data.tokenizers.word_memo import WordMemo
from model_check.errors import DataError

BackendName = Literal["auto", "tokenizers", "gigatoken", "tiktoken"]
Build = Callable[[TextTokenizer], Encode]
"""Raises what the library raises, UnfitError, or ImportError."""

_CHECKED_FIRST = 1 << 16
"""So many characters of a text's first batch are tokenized twice: 30 ms ..."""
_CHECKED_LATER = 1 << 8
"""... and so many of every later one: 1 to 2 % of a preparation with the fastest backend."""


class CheckedEncode(Protocol):
    """The ids of each text. Of the text's first batch more is checked."""

    def __call__(self, texts: Sequence[str], is_first: bool = True) -> list[Ids]: ...


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
    has_memo: bool = False


def choose_backend(wanted: BackendName, tokenizer: TextTokenizer) -> Backend:
    """`auto` takes the fastest that is installed and gives identical ids. Raises DataError when one
    asked for by name cannot be had or disagrees."""
    if wanted == "tokenizers":
        return _tokenizers(tokenizer, "as asked")
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
    return _tokenizers(tokenizer, "; ".join(refused))


def plain(tokenizer: TextTokenizer) -> Encode:
    """`tokenizers` itself. Its ids are Python lists: array() takes them four times as fast as
    numpy does."""
    return lambda texts: [np.asarray(array("I", ids)) for ids in tokenizer.encode(texts)]


def checked(backend: Backend, tokenizer: TextTokenizer, say: Say) -> CheckedEncode:
    """`backend`, samples compared with what `tokenizers` says. If they differ, a word memo is given
    up, and a line says so; for another library raises DataError."""
    current, exact = backend.encode, plain(tokenizer)
    given_up = backend.name == "tokenizers" and not backend.has_memo

    def encode(texts: Sequence[str], is_first: bool = True) -> list[Ids]:
        nonlocal current, given_up
        each = current(texts)
        for number, sample in () if given_up else _samples(texts, is_first):
            whole = len(sample) == len(texts[number])
            given = each[number] if whole else current([sample])[0]
            if _same(given, exact([sample])[0]):
                continue
            if not backend.has_memo:
                what = _disagreement(backend.name, sample)
                raise DataError(f"{what}; set data.tokenizer_backend=tokenizers")
            say(f"data: {_disagreement('the word memo', sample)}: tokenizing without it")
            current, given_up = exact, True
            return exact(texts)
        return each

    return encode


def _samples(texts: Sequence[str], is_first: bool) -> Iterator[tuple[int, str]]:
    """(number of the text, all or a part of it): of the first batch its beginning, of others from a
    place that follows from their texts alone."""
    start, left = (0, _CHECKED_FIRST) if is_first else (sum(map(len, texts)), _CHECKED_LATER)
    for number in range(start, start + len(texts)):
        number %= len(texts)
        text = texts[number]
        offset = start % max(1, len(text) - left + 1)
        yield number, text[offset : offset + left]
        left -= len(text)
        if left <= 0:
            return


def _disagreement(who: str, text: str) -> str:
    return f"{who} gives other ids than tokenizers for a text that begins {text[:40]!r}"


def _tokenizers(tokenizer: TextTokenizer, note: str) -> Backend:
    """With a word memo, where that can be."""
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
        # A Rust panic is no Exception; whatever else a library raises only means: not this one.
        if isinstance(error, KeyboardInterrupt) or not _of_library(error):
            raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnfitError(f"cannot take this tokenizer: {first_line}") from error
    divided = Divided(encode, _exact(tokenizer), characters, _parts(tokenizer))
    why = f"{name} {version}: the same ids as tokenizers on a probe text"
    return Backend(name, why, divided.encode)


def _characters(build: Build, tokenizer: TextTokenizer) -> Characters:
    """Those that the library takes for what `tokenizers` does. Raises UnfitError."""
    if not _normalizes_plainly(json.loads(tokenizer.to_json())["normalizer"]):
        raise UnfitError("needs a tokenizer whose normalizer follows no table of Unicode")

    @cache
    def both() -> tuple[Encode, Encode]:
        one = telling(tokenizer)
        return build(one), plain(one)

    def agree(texts: Sequence[str]) -> list[bool]:
        try:
            fast, exact = both()  # not before it is asked for: 40 ms
        except BaseException as error:
            if not _of_library(error):
                raise
            return [False] * len(texts)  # it cannot be tried: all of it is for `tokenizers`
        return list(map(_same, fast(texts), exact(texts)))

    return Characters(agree)


def _normalizes_plainly(normalizer: dict[str, Any] | None) -> bool:
    """Composition, case and width are of characters together: no trial of each would do."""
    match normalizer:
        case None | {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": _}}:
            return True
        case {"type": "Sequence", "normalizers": list(several)}:
            return all(map(_normalizes_plainly, several))
        case _:
            return False


def _exact(tokenizer: TextTokenizer) -> Encode:
    """`tokenizers`, as fast as it is; made when the first text is for it."""

    @cache
    def backend() -> Backend:
        return _tokenizers(tokenizer, "")

    return lambda texts: backend().encode(texts)


def _parts(tokenizer: TextTokenizer) -> Callable[[str], Iterable[str]]:
    """Windows of a long text, where they are sound."""
    try:
        if has_windows(_pattern(json.loads(tokenizer.to_json()))):
            return windows
    except UnfitError:
        pass
    return lambda text: [text]


def _must_agree(
    encode: Encode, tokenizer: TextTokenizer, characters: Characters | None = None
) -> None:
    """On the probe texts, but for those with characters in dispute. Raises UnfitError."""
    texts = _probe_texts(tokenizer)
    same = map(_same, encode(texts), plain(tokenizer)(texts))
    differ = [text for text, equal in zip(texts, same, strict=True) if not equal]
    if characters is not None:
        differ = [text for text in differ if not characters.in_dispute(text)]
    if differ:
        raise UnfitError(f"gives other ids for a probe text that begins {differ[0][:20]!r}")


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


def _must_be_words_alone(document: dict[str, Any], *models: str) -> None:
    """Raises UnfitError unless the ids of a text follow from its pre-tokens, each by itself."""
    model = document.get("model", {})
    changes = model.get("dropout") or document.get("normalizer") is not None
    if model.get("type") not in models or changes:
        wanted = " or ".join(models)
        raise UnfitError(f"needs a byte-level {wanted} without a normalizer and without dropout")
    if any(not token["special"] for token in document.get("added_tokens", [])):
        raise UnfitError("has no added tokens that are not special")


def _ranks(document: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes -> id, of which tiktoken takes it that they ascend in the order of the merges.
    Raises UnfitError."""
    _must_be_words_alone(document, "BPE")
    added = {token["content"] for token in document.get("added_tokens", [])}
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {
        bytes(byte_of[letter] for letter in token): number
        for token, number in document["model"]["vocab"].items()
        if token not in added
    }


def _without_second_split(document: dict[str, Any]) -> dict[str, Any]:
    """A Split that comes second sees words, one at a time: what a text is cut into comes before."""
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
