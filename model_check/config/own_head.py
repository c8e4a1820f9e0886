"""Whether weights hold a head that is not their embedding, whatever their config.json says: then
transformers 5 does not tie them. Without torch: what describes a model is read before it."""

import json
from pathlib import Path
from typing import BinaryIO, NamedTuple

from model_check.config.shape import EMBEDDING, HEAD
from model_check.utils.files import SETTINGS_BYTES

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = 1 << 20


class _Place(NamedTuple):
    """Of a tensor's bytes."""

    file: Path
    dtype: str
    first: int
    end: int


def has_own_head(directory: Path) -> bool:
    """False, too, where that is not known: what is wrong with a file is told when it is loaded.
    Weights in pickles are not looked at."""
    try:
        head, embedding = (_place(directory, str(row.hf_name)) for row in (HEAD, EMBEDDING))
        return _differ(head, embedding)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _place(directory: Path, name: str) -> _Place:
    """As the format has it: 8 bytes of length, that much JSON, the tensors."""
    file = directory / _FILE
    if not file.is_file():
        file = directory / json.loads((directory / _INDEX).read_bytes())["weight_map"][name]
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > SETTINGS_BYTES:
            raise ValueError("no header is so long")
        header = json.loads(opened.read(length))[name]
    first, end = header["data_offsets"]
    return _Place(file, header["dtype"], 8 + length + first, 8 + length + end)


def _differ(one: _Place, other: _Place) -> bool:
    if (one.dtype, one.end - one.first) != (other.dtype, other.end - other.first):
        return True
    with one.file.open("rb") as first, other.file.open("rb") as second:
        return any(
            _part(first, one.first + at, one.end) != _part(second, other.first + at, other.end)
            for at in range(0, one.end - one.first, _PART)
        )


def _part(file: BinaryIO, first: int, end: int) -> bytes:
    file.seek(first)
    return file.read(min(_PART, end - first))
