"""Runs by hand in one place: each has a directory, and finds it again."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from model_check.engine.saving.own_directory import checkpoint_directory
from model_check.events import Step
from tests.engine.conftest import Worker

Start = Callable[..., Worker]
FOREVER = ("training.max_steps=100000", "training.save_interval=1")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "here")


def test_a_supervised_worker_has_its_own(place: str, said: list[str]) -> None:
    with checkpoint_directory(place, True, "GPU3", said.append) as directory:
        assert (directory, said) == (Path(place) / "gpu3", [])
    assert not Path(place).exists()


def test_the_second_by_hand_gets_a_directory_of_its_own(place: str, said: list[str]) -> None:
    plain, gpu3 = Path(place), Path(place) / "gpu3"
    with ExitStack() as stack, checkpoint_directory(place, False, "GPU0", said.append) as first:
        assert (first, said) == (plain, [])
        with checkpoint_directory(place, False, "GPU3", said.append) as second:
            assert second == gpu3
            (line,) = said
            assert f"{plain} is in use by GPU0 (process " in line
            assert line.endswith(f"checkpoints and evidence go to {gpu3}")
            for name in ("gpu3_2", "gpu3_3"):  # on the same GPU
                third = checkpoint_directory(place, False, "GPU3", said.append)
                assert stack.enter_context(third) == plain / name
    with checkpoint_directory(place, False, "GPU0", said.append) as again:
        assert again == plain


def test_each_finds_its_own_again_whichever_begins_first(place: str, said: list[str]) -> None:
    def begin(worker: str) -> Path:
        with checkpoint_directory(place, False, worker, said.append) as directory:
            return directory

    with checkpoint_directory(place, False, "GPU0", said.append):
        begin("GPU3")
    assert begin("GPU3") == Path(place) / "gpu3"
    assert begin("GPU0") == Path(place)
    assert begin("GPU7") == Path(place)  # it never had another


def test_a_directory_that_cannot_be_made_is_left_to_the_saves(
    tmp_path: Path, said: list[str]
) -> None:
    place = tmp_path / "file"
    place.touch()
    with checkpoint_directory(str(place), False, "GPU0", said.append) as directory:
        assert directory == place


@pytest.mark.parametrize("marks", ["link", "pipe"])
def test_what_another_user_put_there_is_not_followed(
    tmp_path: Path, said: list[str], marks: str
) -> None:
    place, canary = tmp_path / "shared", tmp_path / "canary"
    place.mkdir()
    place.chmod(0o777)
    canary.write_text("mine")
    if marks == "link":
        (place / ".in_use").symlink_to(canary)
    else:
        os.mkfifo(place / ".in_use")
    with checkpoint_directory(str(place), False, "GPU0", said.append) as directory:
        assert directory == place
    assert canary.read_text() == "mine"


def test_two_runs_at_once_share_no_file_and_resume_their_own(start: Start, tmp_path: Path) -> None:
    """The document's `CUDA_VISIBLE_DEVICES=0 ... &` in one directory, on the CPU."""
    first = start(*FOREVER, "system.seed=1")
    next(event for event in first.listen() if isinstance(event, Step))
    second = start(*FOREVER, "system.seed=2")
    next(event for event in second.listen() if isinstance(event, Step))
    for worker in (first, second):
        worker.process.send_signal(signal.SIGTERM)
        worker.finish()
    assert "earlier" not in first.output + second.output
    assert "[CPU0] .checkpoints is in use by CPU0 (process " in second.output
    plain, own = tmp_path / ".checkpoints", tmp_path / ".checkpoints" / "cpu0"
    assert list(plain.glob("step_*.pt"))
    assert list(own.glob("step_*.pt"))
    done = start("training.max_steps=100000", "--resume", "auto", "system.seed=1")
    next(event for event in done.listen() if isinstance(event, Step))
    done.process.send_signal(signal.SIGKILL)  # its place is free all the same
    done.finish()
    assert "[CPU0] Resumed from .checkpoints/step_" in done.output
    again = start("training.max_steps=100000", "--resume", "auto", "system.seed=1")
    next(event for event in again.listen() if isinstance(event, Step))
    assert again.process.poll() is None


def test_a_place_of_its_own_is_taken_whoever_was_there(place: str, said: list[str]) -> None:
    with checkpoint_directory(place, False, "GPU1", said.append):
        pass
    (Path(place) / "gpu0").mkdir()
    with checkpoint_directory(place, False, "GPU0", said.append, has_place=True) as directory:
        assert (directory, said) == (Path(place), [])
