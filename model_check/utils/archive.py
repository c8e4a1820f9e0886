"""Zip archives, such as checkpoints: whether they are whole, by their own checksums."""

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
"""The errors of readers of archives that are cut off or have flipped bytes, depending on where."""


def damage_of(path: Path) -> str | None:
    """What is wrong with the archive, each record compared with its checksum; None: it is whole.
    Raises OSError where it cannot be read."""
    # A read of a pipe would wait.
    if not stat.S_ISREG(path.stat().st_mode):
        return "not a regular file"
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except DAMAGE as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None if record is None else f"record {record} does not match its checksum"


def checksums_of(path: Path, within: str = "") -> int:
    """One checksum of those of its records, or of those with `within` in their names; nothing of
    them is read. Raises OSError, and DAMAGE."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise zipfile.BadZipFile("not a regular file")
    with zipfile.ZipFile(path) as archive:
        infos = [each for each in archive.infolist() if within in each.filename]
        records = [(each.filename, each.CRC, each.file_size) for each in infos]
    return zlib.crc32(repr(records).encode())
