"""The tokenizer that a checkpoint holds, read without torch: only preparing needs it, and torch
takes two seconds to import."""

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

from model_check.data.cache.memo import Memo
from model_check.data.read.manifest import LONGEST
from model_check.data.tokenizers.tokenizer import GivenTokenizer
from model_check.errors import DataError
from model_check.utils.archive import DAMAGE

_NAME = "tokenizer"


class CheckpointTokenizer(GivenTokenizer):
    """Of a checkpoint of ours."""

    def __init__(self, path: Path, memo: Memo) -> None:
        super().__init__(path, path.name, memo)

    def _content(self) -> bytes:
        """Raises OSError, DataError."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                return _unpacked(archive)
        except (pickle.UnpicklingError, AttributeError, TypeError, IndexError, *DAMAGE) as error:
            raise DataError(
                f"{self._path}: holds no tokenizer, or is no checkpoint of Model Check: "
                "data.tokenizer names that of its data"
            ) from error


class _Outline(pickle.Unpickler):
    """What a checkpoint of tensors and plain values holds; for a tensor the number of its record.
    It imports nothing that the file names, and calls nothing but `_first` and `dict`."""

    def find_class(self, module: str, name: str) -> Any:
        return dict if name == "OrderedDict" else _first

    def persistent_load(self, pid: Any) -> Any:
        _, _, key, *_ = pid
        return key


def _first(*arguments: Any) -> Any:
    """Of a tensor's parts: its storage."""
    return arguments[0] if arguments else None


def _unpacked(archive: zipfile.ZipFile) -> bytes:
    """Raises KeyError where it holds none."""
    (outline,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    with archive.open(outline) as file:
        key = _Outline(file).load()[_NAME]
    record = archive.read(f"{outline.removesuffix('data.pkl')}data/{key}")
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(record, LONGEST)
    if not unpacker.eof:
        raise ValueError("cut off, or too long")
    return content
