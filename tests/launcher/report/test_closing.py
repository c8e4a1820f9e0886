"""What a stopped training can go on from, in a line."""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from launcher.report.closing import resume_line
from model_check.config.schema import TrainingSettings
from model_check.events import Saved
from model_check.utils.checkpoint_names import content_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for worker in ("cpu0", "cpu1"):
        (tmp_path / worker).mkdir()
    return tmp_path


def put(path: Path, step: int) -> Saved:
    with ZipFile(path, "w") as archive:
        archive.writestr("step", str(step))
    return Saved(step=step, path=str(path), content=content_of(path))


def told(*workers: list[Saved], **training: Any) -> str:
    saved = {f"CPU{number}": own for number, own in enumerate(workers)}
    return resume_line(TrainingSettings(**training), saved) or ""


def test_the_newest_of_each_worker_is_named(place: Path) -> None:
    """By its step, and as far as it is still what the worker saved."""
    names = {"step_9.pt": 9, "step_4.pt": 4, "best.pt": 9, "step_12.pt": 12, "step_16.pt": 16}
    first = [put(place / "cpu0" / name, step) for name, step in names.items()]
    (place / "cpu0" / "step_12.pt").unlink()
    put(place / "cpu0" / "step_16.pt", 17)  # of another run
    second = [put(place / "cpu1" / name, 4) for name in ("step_4.pt", "last.pt")]
    line = told(first, second, save_interval=2)
    found = "step_9.pt (CPU0), last.pt (CPU1)"
    assert line.startswith(f"checkpoints in {place}: {found}; --resume auto goes on")


def test_one_that_all_workers_have_names_none_of_them(place: Path) -> None:
    workers = [[put(place / worker / "last.pt", 3)] for worker in ("cpu0", "cpu1")]
    line = told(*workers, save_last=True)
    assert line.startswith(f"checkpoints in {place}: last.pt (all 2 CPU workers); --resume auto")


def test_none_yet_is_told_with_what_would_have_saved() -> None:
    line = told([], [], save_last=True)
    assert line.startswith("this run saved no checkpoint (with training.save_on_signal=true")


def test_who_saves_nothing_is_told_nothing(place: Path) -> None:
    assert not told([put(place / "cpu0" / "step_4.pt", 4)])
