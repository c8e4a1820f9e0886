"""Remembers results: hashes of files that did not change since, commits of hub repositories. It
only saves time: it may be lost, and it need not be writable. What another user noted is not
believed: it decides which entry is taken, of which nobody would be told."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from model_check.data.read.manifest import hash_of
from model_check.data.read.sharing import hold_cache, share, shared_directory

_DIRECTORY = ".memo"
_LONGEST = 1 << 16
_SMALL_BYTES = 1 << 20
_SETTLED_S = 2.0


class Memo:
    """Values by signature, a small file for each, in `<cache dir>/.memo`."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir

    def get(self, signature: str) -> str | None:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            with hold_cache(self._cache_dir) as cache, cache.directory(_DIRECTORY) as memo:
                entry = json.loads(memo.read_own(_name_of(signature), _LONGEST))
            if entry["signature"] == signature and isinstance(entry["value"], str):
                return str(entry["value"])
        return None

    def put(self, signature: str, value: str) -> None:
        name = _name_of(signature)
        temporary = f"{name}.{os.getpid()}"
        content = json.dumps({"signature": signature, "value": value}).encode()
        with suppress(OSError), shared_directory(self._cache_dir, _DIRECTORY) as memo:
            with memo.create(temporary) as file:
                file.write(content)
                share(memo, file.fileno())
            memo.rename(temporary, memo, name)

    def remember(self, signature: str, compute: Callable[[], str]) -> str:
        """The value, computed if it is not known."""
        if known := self.get(signature):
            return known
        value = compute()
        self.put(signature, value)
        return value

    def of_file(self, kind: str, path: Path, compute: Callable[[], str]) -> str:
        """The value of a file's content, computed unless the file stayed the same. Raises OSError,
        and the errors of `compute`."""
        return self._unless_changed(lambda: f"{kind} {stat_signature(path)}", [path], compute)

    def of_files(self, kind: str, paths: Sequence[Path], compute: Callable[[], str]) -> str:
        """The same of several files in this order."""

        def signature() -> str:
            return f"{kind} {hash_of([stat_signature(path) for path in paths])}"

        return self._unless_changed(signature, paths, compute)

    def _unless_changed(
        self, signature: Callable[[], str], paths: Sequence[Path], compute: Callable[[], str]
    ) -> str:
        before = signature()
        if known := self.get(before):
            return known
        value = compute()
        if all(map(settled, paths)) and signature() == before:
            self.put(before, value)
        return value


def _name_of(signature: str) -> str:
    return hashlib.sha256(signature.encode()).hexdigest()[:32]


def stat_signature(path: Path) -> str:
    """Changes whenever the file's content may have changed. It includes ctime, since `cp -p`,
    `touch -r` or an edit can restore mtime and size. Raises OSError."""
    st = path.stat()
    return f"{st.st_dev}:{st.st_ino}:{st.st_size}:{st.st_mtime_ns}:{st.st_ctime_ns}"


def file_sha256(path: Path, memo: Memo) -> str:
    """sha256 of the content, remembered for big files. Raises OSError."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    big = path.stat().st_size >= _SMALL_BYTES
    return memo.of_file("sha256", path, compute) if big else compute()


def settled(path: Path) -> bool:
    """Whether the file's times are so old that a later write must change them: the kernel's clock
    for files ticks every few milliseconds, that of some file systems every second or two."""
    st = path.stat()
    return time.time() - max(st.st_mtime, st.st_ctime) > _SETTLED_S
