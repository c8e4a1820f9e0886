"""What a stopped training can go on from, in a line."""

import os
from pathlib import Path
from typing import Any

from launcher.report.closing import resume_line
from model_check.config.schema import TrainingSettings


def told(parent: Path, **training: Any) -> str | None:
    places = {name: parent / name.lower() for name in ("CPU0", "CPU1")}
    return resume_line(TrainingSettings(**training), places)


def put(directory: Path, *names: str) -> None:
    """Written in this order."""
    directory.mkdir()
    for at, name in enumerate(names):
        (directory / name).touch()
        os.utime(directory / name, (at, at))


def test_the_newest_of_each_worker_is_named(tmp_path: Path) -> None:
    put(tmp_path / "cpu0", "step_9.pt", "step_4.pt", "best.pt", "step_8.earlier.pt")
    put(tmp_path / "cpu1", "step_4.pt", "last.pt")
    line = told(tmp_path, save_interval=2)
    assert line is not None
    found = "step_4.pt (CPU0), last.pt (CPU1)"
    assert line.startswith(f"checkpoints in {tmp_path}: {found}; --resume auto goes on")


def test_one_that_all_workers_have_names_none_of_them(tmp_path: Path) -> None:
    put(tmp_path / "cpu0", "last.pt")
    put(tmp_path / "cpu1", "last.pt")
    line = told(tmp_path, save_last=True)
    assert line is not None
    assert line.startswith(f"checkpoints in {tmp_path}: last.pt (all 2 CPU workers); --resume auto")


def test_none_yet_is_told_with_what_would_have_saved(tmp_path: Path) -> None:
    line = told(tmp_path, save_last=True)
    assert line is not None
    assert line.startswith(f"no checkpoint in {tmp_path} yet (with training.save_on_signal=true")


def test_who_saves_nothing_is_told_nothing(tmp_path: Path) -> None:
    put(tmp_path / "cpu0", "step_4.pt")
    assert told(tmp_path) is None
