"""What turns text into ids: `tokenizers` always, with a memory of words where that can be; a faster
library where it gives the same ids.

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

from model_check.data.byte_level import byte_letters
from model_check.data.chunks import GPT_2, cut_for
from model_check.data.progress import Say
from model_check.data.tokenizer import TextTokenizer
from model_check.data.word_memo import WordMemo
from model_check.errors import DataError

BackendName = Literal["auto", "tokenizers", "gigatoken", "tiktoken"]
Ids = NDArray[np.uint32]
Encode = Callable[[Sequence[str]], list[Ids]]
Build = Callable[[TextTokenizer], Encode]
"""Raises what the library raises, UnfitError, or ImportError."""

_CHECKED_CHARACTERS = 1 << 16
"""So much of the real text is tokenized twice: 30 ms."""


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


def checked(backend: Backend, tokenizer: TextTokenizer, say: Say) -> Encode:
    """`backend`, its first texts compared with what `tokenizers` says. If they differ, a word memo
    is given up, and a line says so; for another library raises DataError."""
    if backend.name == "tokenizers" and not backend.has_memo:
        return backend.encode
    current, exact = backend.encode, plain(tokenizer)
    unchecked = _CHECKED_CHARACTERS

    def encode(texts: Sequence[str]) -> list[Ids]:
        nonlocal current, unchecked
        each = current(texts)
        for text, ids in zip(texts, each, strict=True):
            if unchecked <= 0:
                break
            sample = text[:unchecked]  # one document may be gigabytes of memory for `tokenizers`
            unchecked -= len(sample)
            given = ids if sample == text else current([sample])[0]
            if _same(given, exact([sample])[0]):
                continue
            if not backend.has_memo:
                what = _disagreement(backend.name, text)
                raise DataError(f"{what}; set data.tokenizer_backend=tokenizers")
            say(f"data: {_disagreement('the word memo', text)}: tokenizing without it")
            current, unchecked = exact, 0
            return exact(texts)
        return each

    return encode


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
        _must_agree(encode, tokenizer)
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
    return Backend(name, f"{name} {version}: the same ids as tokenizers on a probe text", encode)


def _must_agree(encode: Encode, tokenizer: TextTokenizer) -> None:
    """On the probe texts. Raises UnfitError."""
    texts = _probe_texts(tokenizer)
    same = map(_same, encode(texts), plain(tokenizer)(texts))
    differ = [text for text, equal in zip(texts, same, strict=True) if not equal]
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
