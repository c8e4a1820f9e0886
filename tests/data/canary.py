"""A private directory that nothing of a shared cache may reach, and proof that nothing did."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECRET = "the canary sings "
_EVENT = struct.Struct("iIII")
_ALL_BUT_ANSWERS = 0x00000FFF
_QUEUE_OVERFLOW = 0x00004000
NAMES = ("canary.txt", "manifest.json", "tokenizer.json", "unfinished.json", "tokens-00000.bin")
"""Those that a build writes, reads or removes, too."""


def make_private(directory: Path) -> Path:
    """Files and a directory with modes and times of their own."""
    (directory / "deep").mkdir(parents=True)
    for number, name in enumerate((*NAMES, "deep/canary.txt")):
        path = directory / name
        path.write_text(SECRET * 50)
        path.chmod(0o600)
        os.utime(path, (1_000_000 + number, 2_000_000 + number))
    (directory / "deep").chmod(0o700)
    directory.chmod(0o700)
    return directory


def state_of(directory: Path) -> dict[str, tuple[object, ...]]:
    """All that a write, a chmod or a deletion would change. Reads nothing of a directory's files
    but their content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        st = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (st.st_ino, st.st_mode, st.st_uid, st.st_mtime_ns, content)
    return found


class Watch:
    """Every access to the directories and their files, by whomever: inotify, since atime is only
    kept to a day (relatime)."""

    def __init__(self, *directories: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._places = {
            self._libc.inotify_add_watch(
                self._descriptor, str(directory).encode(), _ALL_BUT_ANSWERS
            ): directory
            for directory in directories
        }
        assert self._descriptor >= 0
        assert min(self._places) >= 0

    def seen(self) -> list[str]:
        """`mask name` of each event since the start, closing left out."""
        found = []
        try:
            while raw := os.read(self._descriptor, 1 << 16):
                while raw:
                    place, mask, _, length = _EVENT.unpack_from(raw)
                    name = raw[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
                    found.append(f"{mask:#x} {self._places.get(place)}/{name}")
                    raw = raw[_EVENT.size + length :]
        except BlockingIOError:
            return found
        return found

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Nothing in it is opened, listed, written, made or removed meanwhile."""
    before = state_of(directory)
    watch = Watch(directory, *(path for path in directory.rglob("*") if path.is_dir()))
    try:
        yield
    finally:  # whatever went wrong, this is worse
        seen = watch.seen()
        watch.close()
        after = state_of(directory)
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        assert not changed, f"changed: {changed}"
        assert not seen, f"accesses: {seen[:20]}"
