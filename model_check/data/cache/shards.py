"""Arrays appended to files of a staging directory, and how much of them is on the disk, so that a
later process can continue after a kill."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from model_check.data.cache.publish import storage_errors
from model_check.data.read.manifest import FileEntry
from model_check.utils.held import HeldDirectory


class Written(msgspec.Struct, frozen=True):
    """What a writer has synced to the disk."""

    num_items: int
    closed: dict[str, FileEntry]
    """Files that are finished."""
    last: FileEntry
    """The beginning of the file after those. Bytes behind it do not count."""


NOTHING = Written(0, {}, FileEntry(0, hashlib.sha256().hexdigest()))


@dataclass
class ShardWriter:
    """Files of at most `shard_items` items each (None: one file), hashed on the way and synced.

    Uses write(), where a full disk is an error. In a writable memory map it is a SIGBUS.
    """

    directory: HeldDirectory
    name_of: Callable[[int], str]
    dtype: str
    shard_items: int | None
    written: Written = NOTHING
    """What another process wrote, which must be `intact`: this one continues."""

    def __post_init__(self) -> None:
        self.num_items = self.written.num_items
        self.files = dict(self.written.closed)
        self._dtype = np.dtype(self.dtype).newbyteorder("<")

    def __enter__(self) -> "ShardWriter":
        with storage_errors(self.directory.path.parent):
            self._open(self.written.last.size)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # The rest of the buffer may not fit on the disk either.
            with suppress(OSError):
                self._file.close()
            return
        with storage_errors(self.directory.path.parent):
            self._close()

    def write(self, items: NDArray[Any]) -> None:
        """Raises StorageError."""
        with storage_errors(self.directory.path.parent):
            while self.shard_items and self._held + items.size > self.shard_items:
                room = self.shard_items - self._held
                self._append(items[:room])
                items = items[room:]
                self._close()
                self._open()
            self._append(items)

    def save(self) -> Written:
        """Sync everything so far. Raises StorageError."""
        with storage_errors(self.directory.path.parent):
            return Written(self.num_items, dict(self.files), self._synced())

    def _append(self, items: NDArray[Any]) -> None:
        # A memoryview cannot cast an empty array.
        if not items.size:
            return
        raw = np.ascontiguousarray(items, self._dtype).data.cast("B")
        self._file.write(raw)
        self._digest.update(raw)
        self._held += items.size
        self.num_items += items.size

    def _open(self, keep_bytes: int = 0) -> None:
        """The next file, of which another process has written the first `keep_bytes`."""
        self._name = self.name_of(len(self.files))
        self._digest = hashlib.sha256()
        if keep_bytes:
            self._file = self.directory.append(self._name)
            self._file.truncate(keep_bytes)
            with self.directory.open(self._name) as file:
                self._digest = hashlib.file_digest(file, "sha256")
        else:
            self._file = self.directory.create(self._name)
        self._held = keep_bytes // self._dtype.itemsize

    def _close(self) -> None:
        with self._file:
            self.files[self._name] = self._synced()

    def _synced(self) -> FileEntry:
        """What the disk holds of the open file: all that was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileEntry(size=self._file.tell(), sha256=self._digest.hexdigest())


def intact(directory: HeldDirectory, name_of: Callable[[int], str], written: Written) -> bool:
    """Whether the disk holds every byte that was synced. Raises OSError."""
    begun = {name_of(len(written.closed)): written.last}
    return all(
        _begins_with(directory, name, entry) for name, entry in (written.closed | begun).items()
    )


def _begins_with(directory: HeldDirectory, name: str, entry: FileEntry) -> bool:
    digest = hashlib.sha256()
    left = entry.size
    with directory.open(name) as file:
        while left and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    return not left and digest.hexdigest() == entry.sha256
