"""Directories whose names are no text."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model_check.errors import NonFiniteError
from model_check.events import Evidence
from tests.engine.conftest import Run


def test_a_directory_of_any_bytes_hides_no_nan(
    tiny_run: Callable[..., Run], tmp_path: Path
) -> None:
    directory = tmp_path / os.fsdecode(b"b\xff")
    run = tiny_run(directory=directory, debug__drill="nan@1")
    with pytest.raises(NonFiniteError, match="step 1"):
        run()
    assert (directory / "nan_grad_step_1.pt").is_file()
    evidence = [event.path for event in run.kept.events if isinstance(event, Evidence)]
    assert evidence[-1].endswith(r"b\udcff/nan_grad_step_1.pt")
