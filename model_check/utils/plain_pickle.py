"""What torch.save has written, without torch and without tensors: a zip with a pickle of plain
values, in which tensors are only named."""

import pickle
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

from model_check.utils.archive import DAMAGE

_PICKLE = "/data.pkl"
_LONGEST = 64 << 20
"""Bytes of the pickle: that of a model of 2,000 tensors has half a million."""
_UNREADABLE = (
    *(*DAMAGE, OSError, pickle.UnpicklingError, TypeError, AttributeError, LookupError),
    *(MemoryError, RecursionError, AssertionError, StopIteration),
)


def plain_values(file: Path) -> Any:
    """None: nothing can be read there, or it is no such file."""
    if not file.is_file():  # a pipe would wait for somebody who writes to it
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(n for n in archive.namelist() if n.endswith(_PICKLE))
            if archive.getinfo(name).file_size > _LONGEST:
                return None
            return _PlainUnpickler(BytesIO(archive.read(name))).load()
    except _UNREADABLE:
        return None


class _PlainUnpickler(pickle._Unpickler):
    """Makes nothing but plain values, whatever class the pickle asks for. The one written in C
    makes room for as many values as a damaged index says (4 GB for 8 bytes)."""

    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Tensor

    def persistent_load(self, _: object) -> None:
        """The values of a tensor."""


class _Tensor:
    """Stands for one, and for whatever else is no plain value."""

    def __init__(self, *_: object) -> None: ...
