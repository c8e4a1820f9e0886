"""Arrays appended to files of a directory that is being filled, and how far that went, so that a
later process can go on where this one was killed."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from model_check.data.cache.publish import storage_errors
from model_check.data.read.manifest import FileEntry
from model_check.utils.held import HeldDirectory


class Written(msgspec.Struct, frozen=True):
    """What a writer has put on the disk for certain."""

    num_items: int
    closed: dict[str, FileEntry]
    """Files that are finished."""
    last: FileEntry
    """The beginning of the file after those: what may stand behind it was never promised."""


class ShardWriter:
    """Files of at most `shard_items` each (None: one file), hashed on the way and synced.

    With write(), never through a writable memory map: a full disk is an error there, a SIGBUS here.
    """

    def __init__(
        self,
        directory: HeldDirectory,
        name_of: Callable[[int], str],
        dtype: str,
        shard_items: int | None,
        written: Written | None = None,
    ) -> None:
        """Goes on after `written`, which `intact` has seen whole."""
        self.num_items = written.num_items if written else 0
        self.files: dict[str, FileEntry] = dict(written.closed) if written else {}
        self._directory = directory
        self._name_of = name_of
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_items = shard_items
        self._keep_bytes = written.last.size if written else 0

    def __enter__(self) -> "ShardWriter":
        with storage_errors(self._directory.path.parent):
            self._open(self._keep_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # what is buffered may not fit either
                self._file.close()
            return
        with storage_errors(self._directory.path.parent):
            self._close()

    def write(self, items: NDArray[Any]) -> None:
        """Raises StorageError."""
        with storage_errors(self._directory.path.parent):
            while self._shard_items and self._held + items.size > self._shard_items:
                room = self._shard_items - self._held
                self._append(items[:room])
                items = items[room:]
                self._close()
                self._open()
            self._append(items)

    def save(self) -> Written:
        """Everything so far, synced. Raises StorageError."""
        with storage_errors(self._directory.path.parent):
            self._file.flush()
            os.fsync(self._file.fileno())
            last = FileEntry(size=self._file.tell(), sha256=self._digest.hexdigest())
        return Written(self.num_items, dict(self.files), last)

    def _append(self, items: NDArray[Any]) -> None:
        if not items.size:  # which a memoryview cannot cast
            return
        raw = np.ascontiguousarray(items, self._dtype).data.cast("B")
        self._file.write(raw)
        self._digest.update(raw)
        self._held += items.size
        self.num_items += items.size

    def _open(self, keep_bytes: int = 0) -> None:
        """The next file, or, of the one that another process began, the first `keep_bytes`."""
        self._name = self._name_of(len(self.files))
        self._digest = hashlib.sha256()
        if keep_bytes:
            self._file = self._directory.append(self._name)
            self._file.truncate(keep_bytes)
            with self._directory.open(self._name) as file:
                self._digest = hashlib.file_digest(file, "sha256")
        else:
            self._file = self._directory.create(self._name)
        self._held = keep_bytes // self._dtype.itemsize

    def _close(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        self.files[self._name] = FileEntry(size=size, sha256=self._digest.hexdigest())


def intact(directory: HeldDirectory, name_of: Callable[[int], str], written: Written) -> bool:
    """Whether all that was promised is on the disk, byte for byte. Raises OSError."""
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
