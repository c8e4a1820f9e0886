"""Files that appear whole for readers: written under another name, synced, renamed into place. And
files that a person names: read whole, if they have an end."""

import codecs
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from model_check.utils.held import hold_unlinked

SETTINGS_BYTES = 1 << 20
"""No settings file is longer."""
_HANDED_OVER = (Path("/dev/fd"), Path("/proc/self/fd"))
"""`--config <(jq ...)`: the shell opened this pipe for us, so somebody writes to it."""


def read_whole(path: Path, limit: int) -> bytes:
    """A plain file of at most `limit` bytes. Another user's pipe would block, a device has no end.
    Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) and (path.parent in _HANDED_OVER or path == Path("/dev/stdin")):
            os.set_blocking(descriptor, True)
        elif not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    return content


def text_of(content: bytes) -> str:
    """What a person wrote: UTF-8, also behind a byte order mark; what a mark says to be UTF-16, as
    some editors save. Raises UnicodeDecodeError."""
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_wide else "utf-8-sig")


def read_text(path: Path, limit: int = SETTINGS_BYTES) -> str:
    """Raises OSError, UnicodeDecodeError."""
    return text_of(read_whole(path, limit))


def lines_of(text: str) -> list[str]:
    """As editors show them: str.splitlines ends one at U+2028 and at form feeds, too."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by a file that holds `data`. See `replacing`."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def check_replaceable(path: Path) -> None:
    """Raises OSError where a person's FILE is, or leads to, something else than a plain file: it
    would be replaced (/dev/null, a pipe that somebody reads)."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))


@contextmanager
def replacing(path: Path, before: Callable[[], object] | None = None) -> Iterator[BufferedWriter]:
    """Yield a new file, which becomes `path` when it is whole and synced: a reader sees the old
    content or the new, never a part. `before`: called when it is whole, just before that.

    Raises OSError (disk full, no permission, another user's link in place of the directory); then
    the old file stays as it was.
    """
    with (
        hold_unlinked(path.parent, make=True) as directory,
        directory.replacing(path.name, before) as file,
    ):
        yield file


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
