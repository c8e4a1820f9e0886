"""A prepared token cache, opened to read: its splits, of which itself is the one to train on."""

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.manifest import (
    TOKENIZER,
    TRAIN,
    TokensManifest,
    Verify,
    ViewManifest,
    hold_view,
    read_view,
    runs_name,
    store_of,
    view_beside,
)
from model_check.data.read.token_split import Split, StoreSplit
from model_check.data.read.token_store import TokenStore, map_files
from model_check.data.read.windows import Tail, Windows
from model_check.errors import DataError


class TokenCache:
    """The sequences of one view's train split, and the way to its other splits."""

    def __init__(self, path: Path, view: ViewManifest, tokens: TokensManifest) -> None:
        self.path = path
        self.view = view
        self.tokens = tokens

    @classmethod
    def open(cls, path: Path, verify: Verify = "size") -> "TokenCache":
        """Raises DataError when there is no whole entry at `path`, naming the file."""
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
        """A split by its name. Raises DataError where there is none of it."""
        if name == TRAIN:
            return self
        entry = self.view.splits.get(name)
        if entry is None:
            raise DataError(f"{self.path}: no split {name!r} (there are {', '.join(self.splits)})")
        if entry.view is not None:
            # Verified with this view.
            return TokenCache.open(view_beside(self.path, entry.view), "off")
        return self._over_store(name, "pad", entry.num_sequences, entry.num_tokens)

    @property
    def dataset(self) -> str:
        return self.view.dataset

    @property
    def context_length(self) -> int:
        return self.view.context_length

    @property
    def stride(self) -> int:
        """Tokens between the starts of neighbouring sequences."""
        return self.view.stride or self.view.context_length

    @property
    def num_sequences(self) -> int:
        return self.view.num_sequences

    @property
    def num_tokens(self) -> int:
        """Tokens in the store, those that no sequence uses included."""
        return self.tokens.num_tokens

    @property
    def vocab_size(self) -> int:
        return self.tokens.vocab_size

    @property
    def end_id(self) -> int:
        """The token after every document."""
        return self.tokens.end_id

    @property
    def tokenizer_path(self) -> Path:
        return self._store.path / TOKENIZER

    @property
    def document_ends(self) -> NDArray[np.uint64]:
        """Where each document ends in the store, its end token included: positions, ascending."""
        return self._store.document_ends

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See Split."""
        return self._train.gather(indices)

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See Split."""
        return self._train.documents(indices)

    @cached_property
    def _store(self) -> TokenStore:
        return TokenStore(store_of(self.path, self.view), self.tokens)

    @cached_property
    def _train(self) -> StoreSplit:
        num_tokens = self.view.num_train_tokens or self.view.num_tokens
        return self._over_store(TRAIN, self.view.tail, self.num_sequences, num_tokens)

    def _over_store(self, name: str, tail: Tail, num_sequences: int, num_tokens: int) -> StoreSplit:
        runs = None
        if (file := runs_name(name)) in self.view.files:
            (runs,) = map_files(hold_view, self.path, [file], "<i8")
            runs = runs.reshape(2, -1)
        windows = Windows(self.context_length, self.stride, tail)
        return StoreSplit(name, self.path, self._store, windows, num_sequences, num_tokens, runs)
