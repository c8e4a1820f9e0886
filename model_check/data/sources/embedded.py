"""Text that is on every machine: documentation and source of the Python that runs.

It needs no network, and nothing is shipped. So its content differs between Python versions, and its
identity is the hash of the content on this machine. Machines with the same Python have the same
text: files that Python's build, a distribution or a person put beside the library are left out.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.data.sources.file_piece import read_errors
from model_check.data.sources.text import Repairs, clean, decode
from model_check.errors import DataError

MAX_BYTES = 8 << 20
"""Enough for 250 sequences of 8192 tokens, and ready within seconds."""
_TOPICS = "pydoc_data/topics.py"
_LEFT_OUT = {
    *("test", "tests", "idle_test", "__pycache__"),
    # Read as documentation instead.
    "pydoc_data",
    # Tables of numbers.
    "encodings",
    # Not on every machine, or not in every version.
    *("idlelib", "lib2to3", "turtledemo", "ensurepip"),
}


class EmbeddedSource:
    """`pydoc`'s topics, then the standard library's .py files in order of their paths."""

    name = "embedded"
    label = "embedded"
    endless = False

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(sysconfig.get_path("stdlib"))

    @property
    def size_bytes(self) -> int:
        return sum(len(raw) for _, raw in self._files)

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for _, raw in self._files:
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        return {"kind": "embedded", "sha256": digest.hexdigest()}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        for name, raw in self._files:
            texts = _topics(raw) if name == _TOPICS else [decode(raw, name, 1, repairs)]
            for text in texts:
                if (document := clean(text, name, repairs)) is not None:
                    yield document

    @cached_property
    def _files(self) -> list[tuple[str, bytes]]:
        """(relative path, content). Read once, so that identity and documents agree."""
        files: list[tuple[str, bytes]] = []
        size = 0
        for path in _paths(self._directory):
            with read_errors(path):
                raw = path.read_bytes()
            size += len(raw)
            if size > MAX_BYTES:
                break
            # Many an __init__.py is empty.
            if raw.strip():
                files.append((path.relative_to(self._directory).as_posix(), raw))
        if not files:
            raise DataError(
                f"{self._directory}: no sources of the standard library of Python "
                f"{sys.version.split()[0]}, so no embedded text; give data.dataset a file"
            )
        return files


def _paths(directory: Path) -> list[Path]:
    paths = []
    for parent, directories, names in os.walk(directory):
        if Path(parent) == directory:
            # Not _sysconfigdata*.py, config-*, sitecustomize.py: these hold paths of a build.
            directories[:], names = _of_python(directories), _of_python(names)
        directories[:] = [name for name in directories if name not in _LEFT_OUT]
        paths += [Path(parent, name) for name in names if name.endswith(".py")]
    topics = directory / _TOPICS
    return [topics] * topics.is_file() + sorted(paths)


def _of_python(names: list[str]) -> list[str]:
    """The modules and packages that Python itself counts as its own."""
    return [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names]


def _topics(raw: bytes) -> list[str]:
    """The texts in `topics = {...}`, read as data: nothing is executed."""
    # Finding a prepared cache does not need it.
    import ast

    for node in ast.parse(raw).body:
        match node:
            case ast.Assign(value=ast.Dict() as value) | ast.AnnAssign(value=ast.Dict() as value):
                return [text for _, text in sorted(ast.literal_eval(value).items())]
    return [raw.decode(errors="replace")]
