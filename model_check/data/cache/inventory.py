"""What a cache directory holds: entries, what was set aside, what builders left. Only reads, and
leaves the time of last use as it was."""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from model_check.data.cache.publish import TMP_PREFIX, is_dead, names_set_aside, unfinished
from model_check.data.read.manifest import (
    LONGEST,
    MANIFEST,
    TOKEN_STORES,
    TokensManifest,
    ViewManifest,
    hold_view,
    read_tokens,
    read_view,
    verify_files,
)
from model_check.data.read.sharing import hold_cache
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory, NotPlainError

Kind = Literal["view", "tokens", "set aside", "unfinished"]
DAY_S = 24 * 3600.0
_VIEW = re.compile(r"[^.].*__[0-9a-f]{16}")
_STORE = re.compile(r"[0-9a-f]{16}")
"""Other names in the directory are not ours."""


@dataclass(frozen=True)
class Entry:
    """One directory of a cache."""

    path: Path
    kind: Kind
    size_bytes: int
    """Of all its files."""
    last_use: float
    """When its manifest was last read, seconds since the epoch: as exact as the file system keeps
    it (`relatime`: to a day; `noatime`: when it was made)."""
    store: str | None
    """The token store that it is, needs, or was to become."""
    about: str
    """For people."""
    dead: bool = False
    """No process works on it, or it is a link in place of an entry."""

    def line(self, root: Path) -> str:
        days = max(0, int((time.time() - self.last_use) / DAY_S))
        name = self.path.relative_to(root)
        kib = self.size_bytes / 2**10
        size = f"{kib / 2**10:,.1f} MiB" if kib >= 2**10 else f"{kib:,.1f} KiB"
        return f"{self.kind:<10} {size:>14} {days:>4} d  {name}  ({self.about})"


def entries(root: Path) -> list[Entry]:
    """Views, token stores, what was set aside, unfinished ones. Empty for a directory that does not
    exist. Raises DataError."""
    try:
        if not root.exists():
            return []
        with hold_cache(root) as cache:
            return [*_views(cache), *_stores(cache), *_left(cache)]
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error.strerror}") from error


def problem(entry: Entry) -> DataError | None:
    """What is wrong with a view or a token store, every checksum compared; None: nothing."""
    try:
        if entry.kind == "view":
            # Its store and other views are entries of their own.
            view, _ = read_view(entry.path, "off")
            with hold_view(entry.path) as directory:
                verify_files(directory, view.files, "full")
        elif entry.kind == "tokens":
            read_tokens(entry.path, "full")
    # It was removed meanwhile.
    except FileNotFoundError:
        return None
    # Not whole, or not readable.
    except DataError as error:
        return error
    return None


def _views(cache: HeldDirectory) -> Iterator[Entry]:
    for name in filter(_VIEW.fullmatch, cache.names()):
        view = _manifest(cache, name, ViewManifest)
        store = _store_named(view) if view else None
        about = "damaged"
        if view and store:
            about = f"{view.num_sequences:,} sequences of {view.context_length} from {store}"
        yield _entry(cache, name, "view", store, about)


def _store_named(view: ViewManifest) -> str | None:
    """None where the manifest, which anybody may have written, has no name of a store."""
    name = Path(view.tokens).name
    return name if _STORE.fullmatch(name) else None


def _stores(cache: HeldDirectory) -> Iterator[Entry]:
    with suppress(FileNotFoundError, NotPlainError), cache.directory(TOKEN_STORES) as stores:
        for name in filter(_STORE.fullmatch, stores.names()):
            tokens = _manifest(stores, name, TokensManifest)
            about = "damaged"
            if tokens:
                about = f"{tokens.num_tokens:,} tokens of {tokens.dataset}, {tokens.tokenizer}"
            yield _entry(stores, name, "tokens", name, about)


def _left(cache: HeldDirectory) -> Iterator[Entry]:
    for name in names_set_aside(cache):
        yield _entry(cache, name, "set aside", None, "was not whole")
    for name in unfinished(cache):
        with suppress(FileNotFoundError):
            dead = is_dead(cache, name)
            store = name.removeprefix(TMP_PREFIX).partition("-")[0]
            about = "left by a builder that is gone" if dead else "being built"
            yield _entry(cache, name, "unfinished", store, about, dead=dead)


def _entry(
    place: HeldDirectory,
    name: str,
    kind: Kind,
    store: str | None,
    about: str,
    *,
    dead: bool = False,
) -> Entry:
    size, last_use = 0, time.time()
    try:
        with place.directory(name) as directory:
            size, last_use = _size(directory), _last_use(directory)
    except NotPlainError:
        about, dead = "no directory, so no entry", True
        # Another process may remove it at the same time.
        with suppress(OSError):
            last_use = place.lstat(name).st_mtime
    # It was removed while we looked, or is not readable.
    except OSError:
        pass
    return Entry(place.path / name, kind, size, last_use, store, about, dead)


def _size(directory: HeldDirectory) -> int:
    """Our entries hold plain files only."""
    total = 0
    for name in directory.names():
        # A file may be removed while we look.
        with suppress(OSError):
            status = directory.lstat(name)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _last_use(directory: HeldDirectory) -> float:
    with suppress(OSError):
        status = directory.plain(MANIFEST)
        return max(status.st_atime, status.st_mtime)
    return directory.status().st_mtime


M = TypeVar("M", ViewManifest, TokensManifest)


def _manifest(place: HeldDirectory, name: str, kind: type[M]) -> M | None:
    with suppress(OSError, ValueError, RecursionError), place.directory(name) as directory:
        try:
            # The access time, which only its owner may leave as it is, does not change.
            content = directory.read(MANIFEST, LONGEST, os.O_NOATIME)
        except PermissionError:
            content = directory.read(MANIFEST, LONGEST)
        return msgspec.json.decode(content, type=kind)
    return None
