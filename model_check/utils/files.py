"""Files that others read appear whole: written beside, synced, renamed into place."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by a file holding `data`; a reader sees the old content or the new, never a
    part.

    Raises OSError (disk full, no permission); the old file then stays as it was.
    """
    with replacing(path) as beside:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success it is synced and renamed over `path`,
    else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    beside = Path(name)
    try:
        yield beside
        beside.chmod(
            0o666 & ~current_umask()
        )  # mkstemp gives 0600: a second user could not read it
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def current_umask() -> int:
    """This process's umask, read from /proc: `os.umask()` could only be read by changing it."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
