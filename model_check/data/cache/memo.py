"""What need not be computed twice: hashes of files that did not change since, commits of hub
repositories. Only ever a short cut: losing it, or being unable to write it, costs time."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from model_check.data.read.sharing import hold_cache, share, shared_directory

_DIRECTORY = ".memo"
_LONGEST = 1 << 16
_SMALL_BYTES = 1 << 20
_SETTLED_S = 2.0


class Memo:
    """Values by signature, a small file each, in `<cache dir>/.memo`."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir

    def get(self, signature: str) -> str | None:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            with hold_cache(self._cache_dir) as cache, cache.directory(_DIRECTORY) as memo:
                entry = json.loads(memo.read(_name_of(signature), _LONGEST))
            if entry["signature"] == signature and isinstance(entry["value"], str):
                return str(entry["value"])
        return None

    def put(self, signature: str, value: str) -> None:
        name = _name_of(signature)
        beside = f"{name}.{os.getpid()}"
        content = json.dumps({"signature": signature, "value": value}).encode()
        with suppress(OSError), shared_directory(self._cache_dir, _DIRECTORY) as memo:
            with memo.create(beside) as file:
                file.write(content)
                share(memo, file.fileno())
            memo.rename(beside, memo, name)


def _name_of(signature: str) -> str:
    return hashlib.sha256(signature.encode()).hexdigest()[:32]


def stat_signature(path: Path) -> str:
    """Changes whenever the file's content may have. With ctime, since mtime and size alone lie
    after `cp -p`, `touch -r` or an edit that restores them."""
    st = path.stat()
    return f"{st.st_dev}:{st.st_ino}:{st.st_size}:{st.st_mtime_ns}:{st.st_ctime_ns}"


def file_sha256(path: Path, memo: Memo) -> str:
    """The content's hash, remembered for big files. Raises OSError."""
    before = stat_signature(path)
    big = path.stat().st_size >= _SMALL_BYTES
    if big and (known := memo.get(f"sha256 {before}")):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if big and settled(path) and stat_signature(path) == before:
        memo.put(f"sha256 {before}", digest)
    return digest


def settled(path: Path) -> bool:
    """Whether the file's times are old enough that a later write must change them: the kernel
    stamps with a granularity of milliseconds, some file systems of seconds."""
    st = path.stat()
    return time.time() - max(st.st_mtime, st.st_ctime) > _SETTLED_S
