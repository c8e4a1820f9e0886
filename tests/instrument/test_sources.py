"""Which files of a person's own a process has imported: what a golden file knows them by."""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from model_check.instrument import sources


class Lazy(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise ImportError(f"{name} begins an import")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a process that has imported nothing."""
    monkeypatch.setattr(sys, "modules", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(name: str, path: Path | str | None, kind: type[ModuleType] = ModuleType) -> None:
    sys.modules[name] = module = kind(name)
    if path is not None:
        module.__file__ = str(path)
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def digests() -> tuple[dict[str, str], list[str]]:
    notes: list[str] = []
    return sources.digests(notes.append), notes


def digest(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def test_own_files_are_named_from_the_script_on_and_no_others(place: Path) -> None:
    imported("__main__", place / "src" / "train.py")
    imported("nets.model", place / "src" / "nets" / "model.py")
    imported("helpers", place / "helpers.py")
    imported("elsewhere", place.parent / "elsewhere.py")
    imported("numpy", place / ".venv" / "lib" / "python3.12" / "site-packages" / "numpy.py")
    imported("json", json.__file__)
    imported("model_check.names", sources.__file__)
    found = {"train.py": "__main__", "nets/model.py": "nets.model", "../helpers.py": "helpers"}
    told = {f"source {name}": digest(text) for name, text in found.items()}
    assert digests() == (told, [])
    (place / "helpers.py").write_text("x = 1")
    assert digests()[0] == told | {"source ../helpers.py": digest("x = 1")}


def test_what_is_no_file_is_passed_over(place: Path) -> None:
    """`python -c`, in a directory that is gone meanwhile."""
    imported("__main__", None)
    imported("lazy", None, Lazy)
    imported("of_torch", "_ops.py")
    imported("null", "/a\0b.py")
    sys.modules["object"] = object()  # type: ignore[assignment]
    imported("mine", place / "mine.py")
    assert digests() == ({"source mine.py": digest("mine")}, [])
    gone = place / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert digests() == ({}, [])


def test_a_file_that_cannot_be_read_is_told(place: Path) -> None:
    imported("__main__", place / "train.py")
    (place / "train.py").unlink()
    told, (note,) = digests()
    assert told == {"source train.py": "unread"}
    assert note.startswith("its file train.py cannot be read, and no golden file knows it: No such")


def test_many_files_have_one_digest(place: Path) -> None:
    for number in range(65):
        imported(f"m{number}", place / f"m{number}.py")
    (told,) = digests()[0].items()
    assert told[0] == "source of 65 files"
    (place / "m7.py").write_text("x = 1")
    assert digests()[0] == {told[0]: digests()[0][told[0]]} != dict([told])
