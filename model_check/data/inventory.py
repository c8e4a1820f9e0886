"""What lies in a cache directory: entries, what was set aside, what builders left. Reads only, and
so that looking does not pass for using."""

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

from model_check.data.manifest import (
    MANIFEST,
    TOKEN_STORES,
    TokensManifest,
    ViewManifest,
    read_tokens,
    read_view,
    verify_files,
)
from model_check.data.publish import TMP_PREFIX, aside, is_dead, unfinished
from model_check.errors import DataError

Kind = Literal["view", "tokens", "set aside", "unfinished"]
_DAY_S = 24 * 3600.0
_VIEW = re.compile(r".+__[0-9a-f]{16}")
_STORE = re.compile(r"[0-9a-f]{16}")
"""Whatever else lies in the directory is not ours."""


@dataclass(frozen=True)
class Entry:
    """One directory of a cache."""

    path: Path
    kind: Kind
    size_bytes: int
    """Of all files in it."""
    last_use: float
    """When its manifest was last read, seconds since the epoch: as exact as the file system keeps
    it (`relatime`: to a day; `noatime`: when it was made)."""
    store: str | None
    """The token store that it is, needs, or was to become."""
    about: str
    """For people."""
    dead: bool = False
    """Nobody works on it (unfinished ones only)."""

    def line(self, root: Path) -> str:
        days = max(0, int((time.time() - self.last_use) / _DAY_S))
        name = self.path.relative_to(root)
        kib = self.size_bytes / 2**10
        size = f"{kib / 2**10:,.1f} MiB" if kib >= 2**10 else f"{kib:,.1f} KiB"
        return f"{self.kind:<10} {size:>14} {days:>4} d  {name}  ({self.about})"


def entries(root: Path) -> list[Entry]:
    """All of them: views, token stores, unfinished ones, what was set aside. None in a directory
    that does not exist."""
    return [*_views(root), *_stores(root), *_left(root)]


def problem(entry: Entry) -> DataError | None:
    """What is wrong with a view or a token store, every checksum looked at; None: nothing."""
    try:
        if entry.kind == "view":
            view, _ = read_view(entry.path, "off")  # stores and other views have their own turn
            verify_files(entry.path, view.files, "full")
        elif entry.kind == "tokens":
            read_tokens(entry.path, "full")
    except FileNotFoundError:
        return None  # removed meanwhile
    except DataError as error:  # not whole, or not to be read
        return error
    return None


def _views(root: Path) -> Iterator[Entry]:
    for path in sorted(path for path in root.glob("[!.]*") if _VIEW.fullmatch(path.name)):
        view = _manifest(path, ViewManifest)
        store = Path(view.tokens).name if view else None
        about = "damaged"
        if view:
            about = f"{view.num_sequences:,} sequences of {view.context_length} from {store}"
        yield _entry(path, "view", store, about)


def _stores(root: Path) -> Iterator[Entry]:
    stores = (root / TOKEN_STORES).glob("[!.]*")
    for path in sorted(path for path in stores if _STORE.fullmatch(path.name)):
        tokens = _manifest(path, TokensManifest)
        about = "damaged"
        if tokens:
            about = f"{tokens.num_tokens:,} tokens of {tokens.dataset}, {tokens.tokenizer}"
        yield _entry(path, "tokens", path.name, about)


def _left(root: Path) -> Iterator[Entry]:
    for path in aside(root):
        yield _entry(path, "set aside", None, "was not whole")
    for path in unfinished(root):
        with suppress(FileNotFoundError):
            dead = is_dead(path)
            store = path.name.removeprefix(TMP_PREFIX).partition("-")[0]
            about = "left by a builder that is gone" if dead else "being built"
            yield _entry(path, "unfinished", store, about, dead=dead)


def _entry(path: Path, kind: Kind, store: str | None, about: str, *, dead: bool = False) -> Entry:
    return Entry(path, kind, _size(path), _last_use(path), store, about, dead)


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):  # it goes while we look
            status = file.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _last_use(path: Path) -> float:
    for place in (path / MANIFEST, path):
        with suppress(OSError):
            status = place.stat()
            return max(status.st_atime, status.st_mtime) if place != path else status.st_mtime
    return time.time()


M = TypeVar("M", ViewManifest, TokensManifest)


def _manifest(path: Path, kind: type[M]) -> M | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_read_unnoticed(path / MANIFEST), type=kind)
    return None


def _read_unnoticed(path: Path) -> bytes:
    """Without changing when it was last read, where we may (its owner may)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
    except PermissionError:
        return path.read_bytes()
    with open(descriptor, "rb") as file:
        return file.read()
