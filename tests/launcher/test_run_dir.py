"""The run directory: where it is, what is refused, what never gets into it."""

import re
from pathlib import Path

import pytest

from launcher import run_dir
from model_check.errors import StorageError


def test_the_default_is_named_by_process_and_time(tmp_path: Path) -> None:
    pattern = r"model_check_logs_\d+_\d{8}_\d{6}"
    assert re.fullmatch(f"/tmp/{pattern}", str(run_dir.default_path(None)))
    assert re.fullmatch(pattern, run_dir.default_path(str(tmp_path)).name)
    assert run_dir.default_path(str(tmp_path)).parent == tmp_path


def test_a_directory_with_files_of_another_run_is_refused(tmp_path: Path) -> None:
    assert run_dir.create(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new" / "gpu0.log").touch()
    with pytest.raises(StorageError, match="must be new or empty"):
        run_dir.create(tmp_path / "new")


def test_a_place_that_cannot_be_made_says_where_and_what_next(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--run-dir") as caught:
        run_dir.create(tmp_path / "file" / "run")
    assert str(tmp_path / "file" / "run") in str(caught.value)
