"""Files appear whole, keep their readers, and leave nothing behind when they fail."""

import os
from pathlib import Path

import pytest

from model_check.utils.files import replacing, write_atomic


def test_a_file_appears_with_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    before = os.umask(0o027)
    try:
        write_atomic(path, "text")
    finally:
        os.umask(before)
    assert path.read_text() == "text"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_failure_keeps_the_old_content_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail_half_way() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_the_old_file_keeps_what_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with path.open("rb") as reader:
        write_atomic(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
