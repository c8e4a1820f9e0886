"""Scalars for TensorBoard, in its own file format, without its packages: `tensorboard --logdir`
reads them, wherever it is installed.

A file is a sequence of records: length (uint64), masked CRC-32C of the length, the bytes, their
masked CRC-32C; each record is a protocol buffer, `Event` of tensorflow/core/util/event.proto. Of it
we write: wall_time (field 1, double), step (2, int64), file_version (3), summary (5), of which each
value (1) has a tag (1) and a simple_value (2, float). A test reads them back with TensorBoard.
"""

import os
import socket
import struct
import time
from pathlib import Path

from model_check.engine.checkpoint import storing

SETTING = "logging.tensorboard_dir"
_POLYNOMIAL = 0x82F63B78
"""CRC-32C (Castagnoli), bits reversed."""
_DOUBLE, _VARINT, _BYTES, _FLOAT = 1, 0, 2, 5


class TensorBoardWriter:
    """One file in `directory`; nothing is held back."""

    def __init__(self, directory: Path) -> None:
        """Makes it. Raises StorageError."""
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / name
        with storing(self.path, SETTING):
            directory.mkdir(parents=True, exist_ok=True)
            self._append(_record(_head()))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Raises StorageError."""
        with storing(self.path, SETTING):
            self._append(_record(_event(step, scalars)))

    def close(self) -> None:
        """The file is whole after every write."""

    def _append(self, record: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(record)


def _head() -> bytes:
    return _wall_time() + _nested(3, b"brain.Event:2")


def _event(step: int, scalars: dict[str, float]) -> bytes:
    values = b"".join(
        _nested(1, _nested(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", _finite(value)))
        for tag, value in scalars.items()
    )
    return _wall_time() + _key(2, _VARINT) + _varint(step) + _nested(5, values)


def _finite(value: float) -> float:
    """Beyond float32's range is its infinity, not an error."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _wall_time() -> bytes:
    return _key(1, _DOUBLE) + struct.pack("<d", time.time())


def _nested(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return b"".join([length, _masked_crc(length), content, _masked_crc(content)])


def _masked_crc(content: bytes) -> bytes:
    """Rotated and shifted, so that the checksum of data with checksums in it is none of those."""
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_table_entry(byte) for byte in range(256)]
