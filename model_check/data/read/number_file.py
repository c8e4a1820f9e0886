"""A file of whole numbers in an entry of the cache."""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from model_check.errors import DataError
from model_check.utils.held import HeldDirectory


class NumberFile:
    """Reads parts into memory and never maps the file: where a mapped file is cut off, whoever
    reads behind its end is killed (SIGBUS). Safe to read from several threads."""

    def __init__(self, descriptor: int, path: Path, dtype: DTypeLike) -> None:
        """Owns the descriptor. `path` is for messages."""
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._path = path
        self._dtype = np.dtype(dtype)
        self._size = os.fstat(descriptor).st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        """Raises DataError."""
        return int(self.read(index, 1)[0])

    def read(self, first: int = 0, count: int | None = None) -> NDArray[np.integer]:
        """At most `count` numbers from `first` on, fewer where the file ends. Raises DataError for
        one that cannot be read, or was cut off since it was opened."""
        left = max(self._size - first, 0)
        numbers = np.empty(left if count is None else min(count, left), self._dtype)
        try:
            num_bytes = self._fill(numbers.view(np.uint8).data, first * self._dtype.itemsize)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if num_bytes < numbers.nbytes:
            size = os.fstat(self._descriptor).st_size
            raise DataError(
                f"{self._path}: was cut off while in use: {size:,} of "
                f"{self._size * self._dtype.itemsize:,} bytes are left; the next preparation makes "
                "it again"
            )
        return numbers

    def first_above(self, value: int, begin: int = 0, end: int | None = None) -> int:
        """Of ascending numbers: where the first one above `value` stands. Raises DataError."""
        return bisect_right(self, value, begin, len(self) if end is None else end)

    def _fill(self, out: memoryview, offset: int) -> int:
        """The bytes that the file had. One call of the system reads at most 2 GiB."""
        done = 0
        while done < len(out):
            num_bytes = os.preadv(self._descriptor, [out[done:]], offset + done)
            if num_bytes == 0:
                break
            done += num_bytes
        return done


def open_numbers(
    hold_entry: Callable[[Path], HeldDirectory], entry: Path, names: Iterable[str], dtype: DTypeLike
) -> list[NumberFile]:
    """Files of an entry. Raises DataError."""
    try:
        with hold_entry(entry) as directory:
            return [_open(directory, name, dtype) for name in names]
    except FileNotFoundError as error:
        raise DataError(f"{entry}: is gone; prepare it again") from error


def _open(directory: HeldDirectory, name: str, dtype: DTypeLike) -> NumberFile:
    path = directory.path / name
    try:
        with directory.open(name) as file:
            return NumberFile(os.dup(file.fileno()), path, dtype)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error}") from error
