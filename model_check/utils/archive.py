"""Zip archives, which checkpoints are: whole or not, by their own checksums."""

import stat
import struct
import zipfile
import zlib
from pathlib import Path

DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    KeyError,
)
"""What readers raise for archives that are cut off or have flipped bytes, depending on where."""


def damage_of(path: Path) -> str | None:
    """What is wrong with the archive, each record held against its checksum; None: it is whole.
    Raises OSError where it cannot be read."""
    if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would be waited for
        return "not a regular file"
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except DAMAGE as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None if record is None else f"record {record} does not match its checksum"
