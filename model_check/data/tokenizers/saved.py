"""The tokenizer that a checkpoint holds, read without torch: only preparing needs it, and torch
takes two seconds to import."""

import io
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_check.data.cache.memo import Memo
from model_check.data.read.manifest import LONGEST
from model_check.data.sources.chat import ChatTemplate, chat_of
from model_check.data.tokenizers.tokenizer import GivenTokenizer
from model_check.errors import DataError
from model_check.utils.archive import DAMAGE
from model_check.utils.checkpoint_names import common_file, is_sharded

_NAME = "tokenizer"
_UNREADABLE = (pickle.UnpicklingError, AttributeError, TypeError, IndexError, MemoryError)


class CheckpointTokenizer(GivenTokenizer):
    """Of a checkpoint of ours."""

    def __init__(self, path: Path, memo: Memo, end_token: str | None = None) -> None:
        """Raises DataError for a sharded one that is damaged."""
        try:
            file = common_file(path) if is_sharded(path) else path
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a checkpoint of Model Check: {error}") from error
        super().__init__(file, path.name, memo, end_token)

    def chat(self) -> ChatTemplate | None:
        """The template of the messages that its model was taught; None: it was taught none. Raises
        DataError."""
        with self._opened() as archive:
            kept = _outline(archive)[1].get("chat")
        return chat_of(kept, self._path)

    def _declared_end(self) -> str | None:
        with self._opened() as archive:
            end_token = _outline(archive)[1].get("end_token")
        return end_token if isinstance(end_token, str) else None

    def _content(self) -> bytes:
        """Raises OSError, DataError."""
        with self._opened() as archive:
            return _unpacked(archive)

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                yield archive
        except (*_UNREADABLE, *DAMAGE) as error:
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


def _outline(archive: zipfile.ZipFile) -> tuple[str, dict[str, Any]]:
    """(directory of its records, what it holds)"""
    (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    return name.removesuffix("data.pkl"), _Outline(io.BytesIO(_record(archive, name))).load()


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    """Raises ValueError for one that would only fill our memory."""
    if archive.getinfo(name).file_size > LONGEST:
        raise ValueError("too long")
    return archive.read(name)


def _unpacked(archive: zipfile.ZipFile) -> bytes:
    """Raises KeyError where it holds none."""
    directory, state = _outline(archive)
    record = _record(archive, f"{directory}data/{state[_NAME]}")
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(record, LONGEST)
    if not unpacker.eof:
        raise ValueError("cut off, or too long")
    return content
