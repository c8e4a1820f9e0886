"""A token store, opened to read: any stretch of its tokens, and where its documents end."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.manifest import DOCUMENTS, TokensManifest, hold_store
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory

T = TypeVar("T", bound=np.generic)


@dataclass(eq=False)
class TokenStore:
    """Maps files when they are first used and never writes. Safe to read from several threads."""

    path: Path
    manifest: TokensManifest

    @cached_property
    def document_ends(self) -> NDArray[np.uint64]:
        """Where each document ends, its end token included: positions, ascending."""
        return map_files(hold_store, self.path, [DOCUMENTS], "<u8")[0]

    def read(self, position: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from `position` on, across shards where needed. Raises
        DataError where the files hold fewer tokens than the manifest says."""
        shard_tokens = self.manifest.shard_tokens
        done = 0
        while done < out.size:
            shard, offset = divmod(position + done, shard_tokens)
            if shard >= len(self._shards):
                raise DataError(
                    f"{self.path}: has no shard {shard}: its manifest promises too much"
                )
            part = whole(self._shards[shard])[offset : offset + out.size - done]
            if part.size == 0:
                raise DataError(
                    f"{self.path}: shard {shard} ends before token {position + done}, which the "
                    "manifest promises (data.verify=full finds out more, and rebuilds)"
                )
            out[done : done + part.size] = part
            done += part.size

    def borders(self, position: int, count: int) -> NDArray[np.int64]:
        """Offsets from `position`, above 0, at which documents begin among `count` tokens."""
        ends = whole(self.document_ends)
        first = np.searchsorted(ends, np.uint64(position), "right")
        last = np.searchsorted(ends, np.uint64(position + count), "left")
        return np.asarray(ends[first:last], np.int64) - position

    @cached_property
    def _shards(self) -> list[NDArray[Any]]:
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        return map_files(hold_store, self.path, self.manifest.shard_names(), dtype)


def map_files(
    hold_entry: Callable[[Path], HeldDirectory], entry: Path, names: Iterable[str], dtype: Any
) -> list[NDArray[Any]]:
    """Map files of an entry read-only. Raises DataError."""
    try:
        with hold_entry(entry) as directory:
            return [_map_items(directory, name, dtype) for name in names]
    except FileNotFoundError as error:
        raise DataError(f"{entry}: is gone; prepare it again") from error


def _map_items(directory: HeldDirectory, name: str, dtype: Any) -> NDArray[Any]:
    try:
        with directory.open(name) as file:
            mapped = np.memmap(file, dtype, mode="r")
    # ValueError: an empty file cannot be mapped.
    except (OSError, ValueError) as error:
        raise DataError(f"{directory.path / name}: cannot be mapped: {error}") from error
    mapped.filename = str(directory.path / name)
    return mapped


def whole(mapped: NDArray[T]) -> NDArray[T]:
    """An array of `map_files`, or a part of one. Raises DataError where its file was cut off since:
    a read behind its end would kill this process (SIGBUS)."""
    if isinstance(mapped, np.memmap):
        file: mmap = mapped._mmap  # type: ignore[attr-defined]  # numpy has no public name for it
        size, mapped_size = file.size(), len(file)
        if size < mapped_size:
            raise DataError(
                f"{mapped.filename}: was cut off while in use: {size:,} of {mapped_size:,} bytes "
                "are left; the next preparation makes it again"
            )
    return mapped
