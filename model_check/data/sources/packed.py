"""Files that are packed with gzip or zstd, as streams of lines."""

import gzip
import io
from pathlib import Path

from model_check.errors import DataError

PACKED = (".gz", ".zst")


def unpacked(file: Path) -> io.BufferedIOBase:
    """What is in it; close it. Raises DataError where pyarrow, which reads zstd, is missing.
    Reading raises OSError, EOFError or zlib.error for what is torn or not packed at all."""
    if file.name.lower().endswith(".gz"):
        return gzip.open(file)
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{file}: zstd needs the pyarrow package: pip install pyarrow") from error
    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
