"""A token store, opened to read: any stretch of its tokens, and where its documents end."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.manifest import DOCUMENTS, TokensManifest, hold_store
from model_check.data.read.number_file import NumberFile, open_numbers
from model_check.errors import DataError


@dataclass(eq=False)
class TokenStore:
    """Opens files when they are first used and never writes. Safe to read from several threads."""

    path: Path
    manifest: TokensManifest

    @cached_property
    def document_ends(self) -> NumberFile:
        """Where each document ends, its end token included: positions, ascending."""
        return open_numbers(hold_store, self.path, [DOCUMENTS], "<u8")[0]

    def read(self, position: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from `position` on, across shards where needed. Raises
        DataError where the files hold fewer tokens than the manifest says."""
        self._read(self._shards, position, out)

    def read_targets(self, position: int, out: NDArray[np.bool_]) -> None:
        """As `read`: which of the tokens are to be learned. Of a store that has targets."""
        self._read(self._targets, position, out)

    def _read(self, shards: Sequence[NumberFile], position: int, out: NDArray[Any]) -> None:
        shard_tokens = self.manifest.shard_tokens
        done = 0
        while done < out.size:
            shard, offset = divmod(position + done, shard_tokens)
            if shard >= len(shards):
                raise DataError(
                    f"{self.path}: has no shard {shard}: its manifest promises too much"
                )
            part = shards[shard].read(offset, out.size - done)
            if part.size == 0:
                raise DataError(
                    f"{self.path}: shard {shard} ends before token {position + done}, which the "
                    "manifest promises (data.verify=full finds out more, and rebuilds)"
                )
            out[done : done + part.size] = part
            done += part.size

    def borders(self, position: int, count: int) -> NDArray[np.int64]:
        """Offsets from `position`, above 0, at which documents begin among `count` tokens."""
        ends = self.document_ends
        first = ends.first_above(position)
        last = ends.first_above(position + count - 1, first)
        return ends.read(first, last - first).astype(np.int64) - position

    @cached_property
    def _shards(self) -> list[NumberFile]:
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        return open_numbers(hold_store, self.path, self.manifest.shard_names(), dtype)

    @cached_property
    def _targets(self) -> list[NumberFile]:
        return open_numbers(hold_store, self.path, self.manifest.targets_names(), np.uint8)
