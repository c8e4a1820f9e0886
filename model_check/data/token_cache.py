"""A prepared token cache, opened to read: windows of tokens straight from memory maps."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.manifest import (
    DOCUMENTS,
    TOKENIZER,
    TokensManifest,
    Verify,
    ViewManifest,
    read_view,
    store_of,
)
from model_check.errors import DataError


class TokenCache:
    """The sequences of one view. Files are mapped when first used and never written."""

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
    def dataset(self) -> str:
        return self.view.dataset

    @property
    def context_length(self) -> int:
        return self.view.context_length

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
        return self._store / TOKENIZER

    @cached_property
    def document_ends(self) -> NDArray[np.uint64]:
        """Where each document ends in the store, its end token included: positions, ascending."""
        return self._map(DOCUMENTS, "<u8")

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences at `indices`: int64 [len(indices), context_length + 1]. A label is the
        next column: shifted here, once, and nowhere else. Safe to call from several threads."""
        windows = np.empty((len(indices), self.context_length + 1), np.int64)
        for row, index in zip(windows, indices, strict=True):
            self._read(int(index), row)
        return windows

    @property
    def _store(self) -> Path:
        return store_of(self.path, self.view)

    @cached_property
    def _shards(self) -> list[NDArray[Any]]:
        dtype = np.dtype(self.tokens.dtype).newbyteorder("<")
        return [self._map(name, dtype) for name in self.tokens.shard_names()]

    def _map(self, name: str, dtype: Any) -> NDArray[Any]:
        path = self._store / name
        try:
            return np.memmap(path, dtype, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataError(f"{path}: cannot be mapped: {error}") from error

    def _read(self, index: int, row: NDArray[np.int64]) -> None:
        """Copy one sequence, which may lie across two shards or more."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        shard_tokens = self.tokens.shard_tokens
        position, done = index * self.context_length, 0
        while done < row.size:
            shard, offset = divmod(position + done, shard_tokens)
            part = self._shards[shard][offset : offset + row.size - done]
            if part.size == 0:
                raise DataError(
                    f"{self._store}: shard {shard} ends before token {position + done}, which the "
                    "manifest promises (data.verify=full finds out more, and rebuilds)"
                )
            row[done : done + part.size] = part
            done += part.size
