"""A prepared token cache, opened to read. It is its own train split and leads to the others."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from model_check.data.read.manifest import (
    TRAIN,
    SplitManifest,
    TokensManifest,
    Verify,
    ViewManifest,
    hold_view,
    neighbour_view,
    read_view,
    rows_name,
    runs_name,
    store_of,
)
from model_check.data.read.number_file import NumberFile, open_numbers
from model_check.data.read.token_split import ExampleRows, Split
from model_check.data.read.token_store import TokenStore
from model_check.errors import DataError


class TokenCache(Split):
    """The train split of one view, and the way to its other splits."""

    def __init__(self, path: Path, view: ViewManifest, tokens: TokensManifest) -> None:
        self.view = view
        self.tokens = tokens
        store = TokenStore(store_of(path, view), tokens)
        counts = view.num_sequences, view.num_train_tokens or view.num_tokens
        runs, rows = _runs(path, view, TRAIN), _rows(path, view, TRAIN, view.train)
        super().__init__(TRAIN, path, store, view.windows, *counts, runs, rows)

    @classmethod
    def open(cls, path: Path, verify: Verify = "size") -> "TokenCache":
        """Raises DataError, which names the file, when there is no whole entry at `path`."""
        try:
            return cls(path, *read_view(path, verify))
        except FileNotFoundError as error:
            raise DataError(f"{path}: no such token cache; prepare_dataset.py makes it") from error

    def __repr__(self) -> str:
        return f"<TokenCache {self.path.name}: {self.num_sequences} x {self.context_length}>"

    def __len__(self) -> int:
        return self.num_sequences

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of all splits, `train` first."""
        return (TRAIN, *self.view.splits)

    def split(self, name: str) -> Split:
        """Raises DataError where no split has that name."""
        if name == TRAIN:
            return self
        entry = self.view.splits.get(name)
        if entry is None:
            raise DataError(f"{self.path}: no split {name!r} (there are {', '.join(self.splits)})")
        if entry.view is not None:
            # It was verified with this view.
            return TokenCache.open(neighbour_view(self.path, entry.view), "off")
        windows = replace(self.windows, tail="pad")
        counts = entry.num_sequences, entry.num_tokens
        runs, rows = _runs(self.path, self.view, name), _rows(self.path, self.view, name, entry)
        return Split(name, self.path, self.store, windows, *counts, runs, rows)


def _runs(path: Path, view: ViewManifest, split: str) -> NumberFile | None:
    """See Split.runs. Raises DataError."""
    if (name := runs_name(split)) not in view.files:
        return None
    return open_numbers(hold_view, path, [name], "<i8")[0]


def _rows(
    path: Path, view: ViewManifest, split: str, counts: SplitManifest | None
) -> ExampleRows | None:
    """See Split.rows. Raises DataError."""
    if counts is None or (name := rows_name(split)) not in view.files:
        return None
    numbers = open_numbers(hold_view, path, [name], "<i8")[0].read().astype(np.int64)
    rows = ExampleRows(numbers, counts.num_sequences)
    if not rows.are_sound(view.num_tokens, view.context_length + 1):
        raise DataError(f"{path / name}: is damaged (data.verify=full finds out, and rebuilds)")
    return rows
