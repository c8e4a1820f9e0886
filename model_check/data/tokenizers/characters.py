"""Characters that a faster library classifies otherwise than `tokenizers`, and a division of texts
between the two libraries by these characters.

A table of Unicode says which characters are letters, numbers, marks or blanks, and libraries carry
tables of different years: gigatoken 0.10 has Unicode 17, tokenizers 0.23 has 16, so 4,657 letters
of one are unknown to the other, and U+0295 has another case. A list of such characters would be out
of date with the next release of either. So characters are tried: a block of 256 when a text first
has one of it, each character in `_CONTEXTS`, with a vocabulary that shows every cut (`revealing`).
A pattern sees only which of its classes a character is in, and these contexts distinguish any two
classes that the patterns in use distinguish (tests/data/tokenizers/test_characters.py): a character
that is cut equally there is cut equally everywhere.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model_check.data.tokenizers.patterns import WINDOW
from model_check.data.tokenizers.tokenizer import END_OF_TEXT, TextTokenizer, byte_letters

Ids = NDArray[np.uint32]
Encode = Callable[[Sequence[str]], list[Ids]]
"""The ids of each text, without any special token."""
Parts = Callable[[str], Iterable[str]]
"""Cuts a long text where every pre-tokenizer does, or not at all."""
_CONTEXTS = (" {}a", "a{}1", "!{}Aa")
_BLOCK = 256
_SAME, _DIFFERENT, _UNTRIED = 0, 1, 2


class Characters:
    """What is known of each character. Tries those that it meets for the first time."""

    def __init__(self, agree: Callable[[Sequence[str]], list[bool]]) -> None:
        """`agree` says for each of some texts whether both libraries cut it equally."""
        self._agree = agree
        self._states = np.full(0x110000, _UNTRIED, np.uint8)
        # Every version of Unicode has the same ASCII.
        self._states[:0x80] = _SAME
        # Surrogates are not text for either library.
        self._states[0xD800:0xE000] = _DIFFERENT

    def in_dispute(self, text: str) -> str:
        """The characters of `text` on which the libraries disagree, each once."""
        codes = _beyond_ascii(text)
        states = self._states[codes]
        if states.max(initial=_SAME) == _UNTRIED:
            for block in np.unique(codes[states == _UNTRIED] // _BLOCK):
                self._try(range(block * _BLOCK, (block + 1) * _BLOCK))
            states = self._states[codes]
        return "".join(map(chr, np.unique(codes[states == _DIFFERENT])))

    def _try(self, block: Iterable[int]) -> None:
        """Tried together first, since in most blocks all agree: 2 to 4 ms."""
        untried = np.array([code for code in block if self._states[code] == _UNTRIED])
        texts = list(map(_in_contexts, untried))
        (all_agree,) = self._agree(["".join(texts)])
        same = True if all_agree else np.array(self._agree(texts))
        self._states[untried] = np.where(same, _SAME, _DIFFERENT)


def revealing(tokenizer: TextTokenizer) -> TextTokenizer:
    """`tokenizer` with another vocabulary, whose ids show every cut in the contexts: the last byte
    of a character merges with what follows it, and what precedes it with its first byte.

    A tokenizer without byte-level letters stays as it is: SentencePiece spells unknown characters
    in bytes, and cuts only at its own sign for a space."""
    document = json.loads(tokenizer.to_json())
    if "ByteLevel" not in json.dumps(document.get("pre_tokenizer")):
        return tokenizer
    letters = byte_letters()
    plain = {letters[ord(c)] for c in "".join(_CONTEXTS) if c not in "{}"}
    first, last = letters[0xC2:0xF5], letters[0x80:0xC0]
    merges = [
        *itertools.product(last, sorted(plain)),
        *itertools.product(sorted(plain), first),
        *itertools.product(sorted(plain), repeat=2),
    ]
    tokens = [*letters, *map("".join, merges), END_OF_TEXT]
    document["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    document["model"]["merges"] = merges
    document["added_tokens"] = []
    return TextTokenizer(Tokenizer.from_str(json.dumps(document)), tokenizer.name)


def _in_contexts(code: int) -> str:
    return "".join(context.replace("{}", chr(code)) for context in _CONTEXTS)


def _beyond_ascii(text: str) -> NDArray[np.uint32]:
    """The code points of characters that are not ASCII. A million characters take 1 ms, ASCII
    nothing."""
    if text.isascii():
        return np.empty(0, np.uint32)
    # UTF-16 is nearest to Python's own form of most texts: half the time of UTF-8 and of UTF-32.
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.dtype("<u2"))
    rest = units[units >= 0x80].tobytes().decode("utf-16-le", "surrogatepass")
    return np.frombuffer(rest.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


@dataclass(frozen=True)
class Divided:
    """Encodes with `fast`, and texts with a character in dispute with `exact`."""

    fast: Encode
    exact: Encode
    characters: Characters
    parts: Parts
    """Without it one such character sends 20 MB to `tokenizers`."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See Encode."""
        return by_parts(self._batch, texts, self.parts)

    def _batch(self, texts: Sequence[str]) -> list[Ids]:
        others = "".join(text for text in texts if not text.isascii())
        disputed = frozenset(self.characters.in_dispute(others))
        if not disputed:
            return self.fast(texts)
        is_fast = [text.isascii() or disputed.isdisjoint(text) for text in texts]
        fast = iter(self.fast(list(compress(texts, is_fast))))
        exact = iter(self.exact(list(compress(texts, [not yes for yes in is_fast]))))
        return [next(fast if yes else exact) for yes in is_fast]


def by_parts(encode: Encode, texts: Sequence[str], parts: Parts) -> list[Ids]:
    """The ids of each text; a long one is encoded part by part, since `tokenizers` takes 125 bytes
    of memory for each character."""
    if max(map(len, texts), default=0) <= WINDOW:
        return encode(texts)
    return [np.concatenate([encode([part])[0] for part in parts(text)]) for text in texts]
