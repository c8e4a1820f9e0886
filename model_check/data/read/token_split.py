"""The sequences of one split: windows over documents of a token store, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.token_store import TokenStore
from model_check.data.read.windows import Windows

PADDING = -100
"""Stands where a padded window has no token: what cross entropy ignores."""


class Split(Protocol):
    """What loaders read."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def stride(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences at `indices`: int64 [len(indices), context_length + 1]. A label is the
        next column: shifted here, once, and nowhere else. Behind the split's last token stands
        PADDING. Safe to call from several threads."""

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which document of its row each input belongs to, from 0: int64 [len(indices),
        context_length]. An end token belongs to the document that it ends, padding to one of its
        own."""


@dataclass(frozen=True)
class StoreSplit:
    """A split whose tokens lie in one store."""

    name: str
    path: Path
    """Of the view, for messages."""
    store: TokenStore
    windows: Windows
    num_sequences: int
    num_tokens: int
    runs: NDArray[np.int64] | None
    """[2, n]: where each run of tokens begins in the split, and where in the store; None: the split
    is the store."""

    def __repr__(self) -> str:
        return f"{self.path} ({self.name})"

    @property
    def context_length(self) -> int:
        return self.windows.context_length

    @property
    def stride(self) -> int:
        return self.windows.stride

    @property
    def vocab_size(self) -> int:
        return self.store.manifest.vocab_size

    @property
    def end_id(self) -> int:
        return self.store.manifest.end_id

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See Split."""
        rows = np.empty((len(indices), self.context_length + 1), np.int64)
        for row, index in zip(rows, indices, strict=True):
            end = 0
            for done, position, count in self._pieces(int(index), row.size):
                end = done + count
                self.store.read(position, row[done:end])
            row[end:] = PADDING
        return rows

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See Split."""
        begins = np.zeros((len(indices), self.context_length), np.int64)
        for row, index in zip(begins, indices, strict=True):
            for done, position, count in self._pieces(int(index), row.size):
                row[done : done + 1] = 1  # runs are whole documents, so the next is another one
                row[done + self.store.borders(position, count)] = 1
                row[done + count : done + count + 1] = 1  # padding, where nothing follows
        begins[:, 0] = 0
        return np.cumsum(begins, axis=1, out=begins)

    def _pieces(self, index: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(how much of the row lies before, position in the store, tokens) of each stretch that the
        first `size` tokens of a sequence are made of."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        first = index * self.stride
        last = min(first + size, self.num_tokens)
        if self.runs is None:
            yield 0, first, last - first
            return
        begins, places = self.runs
        run = int(np.searchsorted(begins, first, "right")) - 1
        position = first
        while position < last:
            end = int(begins[run + 1]) if run + 1 < begins.size else self.num_tokens
            count = min(last, end) - position
            yield position - first, int(places[run]) + position - int(begins[run]), count
            position, run = position + count, run + 1
