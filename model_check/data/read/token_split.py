"""The sequences of one split: windows over the documents of a token store, one after the other; or
whole examples."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.number_file import NumberFile
from model_check.data.read.token_store import TokenStore
from model_check.data.read.windows import Windows

PADDING = -100
"""Fills the places of a padded window that have no token: cross entropy ignores it."""


@dataclass(eq=False, repr=False)
class Split:
    """Its tokens lie in one store. Safe to read from several threads."""

    name: str
    path: Path
    """Of the view, for messages."""
    store: TokenStore
    windows: Windows
    num_sequences: int
    num_tokens: int
    """Tokens of the split, those that no window uses included."""
    runs: NumberFile | None
    """Where each of n runs of tokens begins in the split, n numbers, and then where in the store, n
    numbers. None: the split is the whole store."""
    rows: "ExampleRows | None" = None
    """Where the sequences are examples; None: they are windows."""

    def __repr__(self) -> str:
        return f"{self.path} ({self.name})"

    @property
    def context_length(self) -> int:
        return self.windows.context_length

    @property
    def stride(self) -> int:
        """Tokens between the starts of neighbouring sequences."""
        return self.windows.stride

    @property
    def vocab_size(self) -> int:
        return self.store.manifest.vocab_size

    @property
    def end_id(self) -> int:
        """The token after every document."""
        return self.store.manifest.end_id

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences at `indices`: int64 [len(indices), context_length + 1]. The label of a
        token is the next column: it is shifted here, once, and nowhere else. PADDING follows the
        split's last token."""
        rows = np.empty((len(indices), self.context_length + 1), np.int64)
        for row, index in zip(rows, indices, strict=True):
            end = 0
            for done, position, count in self._pieces(int(index), row.size):
                end = done + count
                self.store.read(position, row[done:end])
            row[end:] = PADDING
        return rows

    def targets(self, indices: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which tokens of `gather` are to be learned: bool [len(indices), context_length + 1];
        None: all of them."""
        if not self.store.manifest.has_targets:
            return None
        rows = np.zeros((len(indices), self.context_length + 1), np.bool_)
        for row, index in zip(rows, indices, strict=True):
            for done, position, count in self._pieces(int(index), row.size):
                self.store.read_targets(position, row[done : done + count])
        return rows

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number, from 0, of the document in its row that each token of `gather` belongs to:
        int64 [len(indices), context_length + 1]. An end token belongs to the document that it ends;
        padding counts as a document of its own."""
        begins = np.zeros((len(indices), self.context_length + 1), np.int64)
        for row, index in zip(begins, indices, strict=True):
            for done, position, count in self._pieces(int(index), row.size):
                # A run holds whole documents, so each piece begins another one.
                row[done : done + 1] = 1
                row[done + self.store.borders(position, count)] = 1
                # Padding begins here, unless another piece follows.
                row[done + count : done + count + 1] = 1
        begins[:, 0] = 0
        return np.cumsum(begins, axis=1, out=begins)

    def _pieces(self, index: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the row, position in the store, tokens) of each stretch of the store that the
        first `size` tokens of a sequence consist of."""
        self._check_index(index)
        if self.rows is not None:
            yield from self.rows.pieces(index)
            return
        first = index * self.stride
        last = min(first + size, self.num_tokens)
        if self.runs is None:
            yield 0, first, last - first
            return
        num_runs = len(self.runs) // 2
        run = self.runs.first_above(first, 0, num_runs) - 1
        position = first
        while position < last:
            end = self.runs[run + 1] if run + 1 < num_runs else self.num_tokens
            count = min(last, end) - position
            yield position - first, self.runs[num_runs + run] + position - self.runs[run], count
            position, run = position + count, run + 1

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")


class ExampleRows:
    """Which pieces of a store each sequence of examples has; see ViewManifest.files."""

    def __init__(self, numbers: NDArray[np.int64], num_rows: int) -> None:
        num_pieces = (len(numbers) - num_rows - 1) // 2
        self._firsts, self._positions, self._sizes = np.split(
            numbers, [num_rows + 1, num_rows + 1 + num_pieces]
        )

    def are_sound(self, num_tokens: int, room: int) -> bool:
        """Whether they lead into a store of so many tokens, and fill no sequence over `room`."""
        firsts, positions, sizes = self._firsts, self._positions, self._sizes
        if firsts[0] != 0 or firsts[-1] != len(sizes) or bool((np.diff(firsts) < 1).any()):
            return False
        are_inside = (sizes > 0) & (sizes <= room) & (positions >= 0)
        if not bool((are_inside & (positions <= num_tokens - sizes)).all()):
            return False
        return bool((np.add.reduceat(sizes, firsts[:-1]) <= room).all())

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """As Split._pieces."""
        done = 0
        for piece in range(self._firsts[row], self._firsts[row + 1]):
            count = int(self._sizes[piece])
            yield done, int(self._positions[piece]), count
            done += count
