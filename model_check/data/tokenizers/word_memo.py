"""`tokenizers` with a memory: a chunk of text is tokenized once and looked up from then on.

Most words of a text occurred before. `chunks` says what a chunk is, and proves that the ids of a
text are those of its chunks in a row.
"""

import re
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_check.data.tokenizers.chunks import by_windows

_MAX_CHARACTERS = 4 << 20
"""Of all chunks in the memory; with more it is emptied. Chunks of 7 characters then take 80 MB."""
_MAX_CHUNK = 100
"""Characters; longer chunks hardly occur twice."""
_MAX_NEW = 0.4
"""A text of which a greater part is new is tokenized as a whole: a chunk alone takes two to three
times as long as within a text."""


@dataclass
class WordMemo:
    """Texts to ids. Not safe for several threads."""

    cut: re.Pattern[str]
    """Its `findall` gives the chunks of a text."""
    tokenize: Callable[[Sequence[str]], list[list[int]]]
    """The ids of each of some texts."""
    max_new: float = _MAX_NEW
    max_characters: int = _MAX_CHARACTERS

    def __post_init__(self) -> None:
        self._ids_of: dict[str, bytes] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, without any special token."""
        return by_windows(self._batch, texts)

    def _batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        each = [self.cut.findall(text) for text in texts]
        new = set[str]().union(*each).difference(self._ids_of)
        if sum(map(len, new)) > self.max_new * sum(map(len, texts)):
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
        """Long chunks, and all chunks when there are too many."""
        for chunk in new:
            if len(chunk) > _MAX_CHUNK:
                del self._ids_of[chunk]
                self._num_characters -= len(chunk)
        if self._num_characters > self.max_characters:
            self._ids_of.clear()
            self._num_characters = 0

    def _tokenized(self, texts: Sequence[str]) -> list[bytes]:
        return [array("I", ids).tobytes() for ids in self.tokenize(texts)]
