"""`tokenizers` with a memory: a chunk of text is tokenized once and looked up from then on.

A text is mostly words that were there before. What a chunk is, and why the ids of a text are those
of its chunks in a row, stands in `chunks`.
"""

import re
from array import array
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from model_check.data.tokenizers.chunks import WINDOW, windows

_MAX_CHARACTERS = 4 << 20
"""Of all chunks in the memory; then it begins anew. Of 7 characters each they take 80 MB."""
_MAX_CHUNK = 100
"""Characters; longer ones are hardly met twice."""
_MAX_NEW = 0.4
"""Where a greater part of a text is new, it is tokenized as it is: alone, a chunk costs two to
three times as much as within a text."""


class WordMemo:
    """Texts to ids. Not for several threads at once."""

    def __init__(
        self,
        cut: re.Pattern[str],
        tokenize: Callable[[Sequence[str]], list[list[int]]],
        max_new: float = _MAX_NEW,
        max_characters: int = _MAX_CHARACTERS,
    ) -> None:
        """`cut.findall` gives the chunks of a text, `tokenize` the ids of each of some texts."""
        self._cut = cut
        self._tokenize = tokenize
        self._max_new = max_new
        self._max_characters = max_characters
        self._ids_of: dict[str, bytes] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, without any special token."""
        if max(map(len, texts), default=0) <= WINDOW:
            return self._batch(texts)
        return [
            np.concatenate([self._batch([part])[0] for part in windows(text)]) for text in texts
        ]

    def _batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        each = [self._cut.findall(text) for text in texts]
        new = set[str]().union(*each).difference(self._ids_of)
        if sum(map(len, new)) > self._max_new * sum(map(len, texts)):
            return [np.frombuffer(ids, np.uint32) for ids in self._tokenized(texts)]
        self._learn(new)
        ids_of = self._ids_of.__getitem__
        found = [np.frombuffer(b"".join(map(ids_of, chunks)), np.uint32) for chunks in each]
        self._forget(new)
        return found

    def _learn(self, new: Collection[str]) -> None:
        self._ids_of.update(zip(new, self._tokenized(list(new)), strict=True))
        self._num_characters += sum(map(len, new))

    def _forget(self, new: Collection[str]) -> None:
        """What is long, and everything when it is too much."""
        for chunk in new:
            if len(chunk) > _MAX_CHUNK:
                del self._ids_of[chunk]
                self._num_characters -= len(chunk)
        if self._num_characters > self._max_characters:
            self._ids_of.clear()
            self._num_characters = 0

    def _tokenized(self, texts: Sequence[str]) -> list[bytes]:
        return [array("I", ids).tobytes() for ids in self._tokenize(texts)]
