"""Checkpoint files: written whole or not at all, verified before anything of them is used. What is
in them is `state`'s."""

import fcntl
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from model_check.errors import StorageError, UsageError
from model_check.utils.files import replacing

SCHEMA = 2

# What zipfile raises for archives that are cut off or have flipped bytes, depending on where.
_DAMAGE = (
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


class CheckpointError(UsageError):
    """A checkpoint cannot be resumed from."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Tensors and plain types only: it loads with weights_only=True.

    Raises StorageError; an older file of that name then stays. A file that is being written is
    locked, so that a dead writer's can be told from a living one's.
    """
    with storing(path), replacing(path) as beside, beside.open("r+b") as written:
        with suppress(OSError):  # a file system without locks: a leftover then stays
            fcntl.flock(written, fcntl.LOCK_EX)
        torch.save(state, beside)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in `path`, on the CPU and mapped, not read. Raises CheckpointError."""
    _verify(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        schema = state.get("schema") if isinstance(state, dict) else None
    except (pickle.UnpicklingError, OSError, AttributeError, *_DAMAGE) as error:
        raise CheckpointError(f"{path}: not a checkpoint of ours: {_first_line(error)}") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"{path}: written by another version (schema {schema}, this one reads {SCHEMA})"
        )
    return state


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into StorageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save has no class of its own for a full disk
        raise StorageError(
            f"{path}: cannot be written: {_first_line(error)}; free space there, or set "
            "system.checkpoint_dir"
        ) from error


def _verify(path: Path) -> None:
    """Every record against its checksum. torch.load itself ignores them (tried: a flipped weight
    loads without a word)."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: damaged: {_first_line(error)}") from error
    if damaged is not None:
        raise CheckpointError(f"{path}: damaged: record {damaged} does not match its checksum")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
