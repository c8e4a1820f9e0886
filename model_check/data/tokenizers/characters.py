"""The characters that a faster library takes for something else than `tokenizers` does.

Which characters are letters, numbers, marks or blanks is a table of Unicode, and libraries carry
tables of different years: gigatoken 0.10 has Unicode 17, tokenizers 0.23 has 16, so that 4,657
letters of one are unknown to the other, and U+0295 is of another case. A list of such characters
would age with the next release of either. So they are tried: a block of 256 when a text first has
one of it, each character in `_CONTEXTS`, with a vocabulary that shows every cut (`telling`). A
pattern sees only which of its classes a character is in, and any two classes that the patterns in
use tell apart, these contexts tell apart (tests/data/tokenizers/test_characters.py): what is equal
there is equal everywhere.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model_check.data.tokenizers.byte_level import byte_letters
from model_check.data.tokenizers.tokenizer import END_OF_TEXT, TextTokenizer

_CONTEXTS = (" {}a", "a{}1", "!{}Aa")
_BLOCK = 256
_SAME, _DIFFERENT, _UNTRIED = 0, 1, 2


class Characters:
    """What is known of each character so far. Tries what it meets."""

    def __init__(self, agree: Callable[[Sequence[str]], list[bool]]) -> None:
        """`agree`: whether both libraries cut a text alike, for each of some texts."""
        self._agree = agree
        self._states = np.full(0x110000, _UNTRIED, np.uint8)
        self._states[:0x80] = _SAME  # every version of Unicode has the same ASCII
        self._states[0xD800:0xE000] = _DIFFERENT  # surrogates are no text to either

    def in_dispute(self, text: str) -> str:
        """The characters of `text` that the libraries disagree about, each once."""
        codes = _beyond_ascii(text)
        states = self._states[codes]
        if states.max(initial=_SAME) == _UNTRIED:
            for block in np.unique(codes[states == _UNTRIED] // _BLOCK):
                self._try(range(block * _BLOCK, (block + 1) * _BLOCK))
            states = self._states[codes]
        return "".join(map(chr, np.unique(codes[states == _DIFFERENT])))

    def _try(self, block: Iterable[int]) -> None:
        """Most blocks are equal as a whole: 2 to 4 ms."""
        untried = np.array([code for code in block if self._states[code] == _UNTRIED])
        texts = list(map(_in_contexts, untried))
        (all_agree,) = self._agree(["".join(texts)])
        same = True if all_agree else np.array(self._agree(texts))
        self._states[untried] = np.where(same, _SAME, _DIFFERENT)


def telling(tokenizer: TextTokenizer) -> TextTokenizer:
    """`tokenizer` with another vocabulary, whose ids show every cut in the contexts: the last byte
    of a character merges with what follows it, and what precedes it with its first byte.

    Without byte-level letters the tokenizer itself: SentencePiece spells what it does not know in
    bytes, and cuts at its own sign for a space only."""
    document = json.loads(tokenizer.to_json())
    if "ByteLevel" not in json.dumps(document["pre_tokenizer"]):
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
    """The code points of its other characters. A million characters take 1 ms, ASCII nothing."""
    if text.isascii():
        return np.empty(0, np.uint32)
    # UTF-16 is nearest to how Python holds most texts: half the time of UTF-8 and of UTF-32.
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.dtype("<u2"))
    rest = units[units >= 0x80].tobytes().decode("utf-16-le", "surrogatepass")
    return np.frombuffer(rest.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
