"""Hashes of files of this machine, and how they were when they were hashed."""

from collections.abc import Sequence
from pathlib import Path

from model_check.data.cache.memo import Memo, file_sha256, stat_signature
from model_check.data.read.manifest import hash_of
from model_check.errors import DataError

_MANY = 64
"""Files. Of fewer no memory of all together is worth its own file."""


class HashedFiles:
    """The files of one source."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._signatures: dict[Path, str] = {}

    def signature(self, file: Path) -> str:
        """Its `stat_signature` when it was first asked for. Raises OSError, DataError."""
        if file not in self._signatures:
            self._signatures[file] = stat_signature(file)
            # A read of a pipe would wait.
            if not file.is_file():
                raise DataError(f"{file}: is no regular file")
        return self._signatures[file]

    def contents(self, files: Sequence[Path], suffixes: Sequence[str | None]) -> str:
        """A hash of all files in their order, each with its suffix. Of many it is remembered as a
        whole: to open and hash 10,000 small ones takes longer than all else that a cache hit needs.
        Raises OSError, DataError."""
        # Taken before they are hashed, so that a later change is noticed.
        for file in files:
            self.signature(file)

        def compute() -> str:
            hashes = [file_sha256(file, self._memo) for file in files]
            return hash_of([[suffix, sha] for suffix, sha in zip(suffixes, hashes, strict=True)])

        if len(files) < _MANY:
            return compute()
        return self._memo.of_files(f"texts {hash_of(suffixes)}", files, compute)
