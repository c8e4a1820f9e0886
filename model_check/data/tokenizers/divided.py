"""Documents divided between a faster library and `tokenizers`, by the characters in them."""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from model_check.data.tokenizers.characters import Characters
from model_check.data.tokenizers.chunks import WINDOW

Ids = NDArray[np.uint32]
Encode = Callable[[Sequence[str]], list[Ids]]


class Divided:
    """Encodes with `fast`; a text with a character in dispute with `exact`."""

    def __init__(
        self,
        fast: Encode,
        exact: Encode,
        characters: Characters,
        parts: Callable[[str], Iterable[str]],
    ) -> None:
        """`parts` cuts a long text where every pre-tokenizer does, or not at all: one such
        character is not to send 20 MB to `tokenizers`, which takes 125 bytes of memory for each."""
        self._fast = fast
        self._exact = exact
        self._characters = characters
        self._parts = parts

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without any special token."""
        if max(map(len, texts), default=0) <= WINDOW:
            return self._batch(texts)
        return [
            np.concatenate([self._batch([part])[0] for part in self._parts(text)]) for text in texts
        ]

    def _batch(self, texts: Sequence[str]) -> list[Ids]:
        others = "".join(text for text in texts if not text.isascii())
        disputed = frozenset(self._characters.in_dispute(others))
        if not disputed:
            return self._fast(texts)
        is_fast = [text.isascii() or disputed.isdisjoint(text) for text in texts]
        fast = iter(self._fast(list(compress(texts, is_fast))))
        exact = iter(
            self._exact([text for text, yes in zip(texts, is_fast, strict=True) if not yes])
        )
        return [next(fast if yes else exact) for yes in is_fast]
