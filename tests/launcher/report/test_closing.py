"""Lines that end a run: for whom ranks waited, what a stopped training can go on from."""

import shlex
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from launcher.report.closing import checkpoint_lines, waits
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.slow import WARM_UP
from model_check.config.schema import Settings, SystemSettings, TrainingSettings
from model_check.events import Saved, Step
from model_check.utils.checkpoint_names import content_of
from tests.launcher.report.test_table import worker


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("cpu0", "cpu1"):
        (tmp_path / name).mkdir()
    return tmp_path


def put(path: Path, step: int) -> Saved:
    with ZipFile(path, "w") as archive:
        archive.writestr("step", str(step))
    return Saved(step=step, path=str(path), content=content_of(path))


def told(*workers: list[Saved], **training: Any) -> str:
    saved = {f"CPU{number}": own for number, own in enumerate(workers)}
    settings = Settings(training=TrainingSettings(**training))
    return "\n".join(checkpoint_lines(settings, "train", saved, is_stopped=True, speaks="text"))


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


def done(
    saved: dict[str, list[Saved]], max_steps: int = 3, speaks: str = "text", **system: Any
) -> list[str]:
    training = TrainingSettings(max_steps=max_steps, save_last=True)
    settings = Settings(training=training, system=SystemSettings(**system))
    return list(checkpoint_lines(settings, "train", saved, is_stopped=False, speaks=speaks))


def test_a_training_that_is_done_says_where_its_weights_are_and_what_to_do(place: Path) -> None:
    saved = {"CPU0": [put(place / "cpu0" / "last.pt", 3)]}
    where, asked, goes_on = done(saved)
    assert where == f"checkpoint: {place}/cpu0/last.pt"
    assert asked == f"next: bash run.sh generate {place}/cpu0/last.pt --prompt 'Once upon a time'"
    assert (
        goes_on
        == f"train on: bash run.sh --preset train --workers 1 --resume {place}/cpu0 --max-steps 6"
    )
    assert (
        done(saved, max_steps=9)[-1]
        == f"train on: bash run.sh --preset train --workers 1 --resume {place}/cpu0"
    )
    assert done(saved, speaks="chat")[1].endswith("/last.pt --chat")
    assert done(saved, speaks="music")[1].endswith(" --prompt-midi begins.mid --midi goes_on.mid")
    assert not done({"CPU0": []})


def test_what_is_to_be_typed_can_be_typed(tmp_path: Path) -> None:
    (tmp_path / "my runs").mkdir()
    saved = {"GPU3": [put(tmp_path / "my runs" / "last.pt", 3)]}
    _, asked, goes_on = done(saved, checkpoint_dir=f"{tmp_path}/my runs")
    assert shlex.split(asked)[4] == f"{tmp_path}/my runs/last.pt"
    assert shlex.split(goes_on)[4:] == [
        *("--preset", "train", "--gpu", "3", "--resume", f"{tmp_path}/my runs", "--max-steps", "6"),
        f"system.checkpoint_dir={tmp_path}/my runs",
    ]


def test_none_yet_is_told_with_what_would_have_saved() -> None:
    line = told([], [], save_last=True)
    assert line.startswith("this run saved no checkpoint (with training.save_on_signal=true")


def test_who_saves_nothing_is_told_nothing() -> None:
    assert not told([])


@pytest.mark.parametrize(
    ("shares", "steps", "whom"),
    [
        ((0.29, 0.31), 500, ""),
        ((0.60, 0.48, 0.35), 500, ""),
        ((0.60, 0.55, 0.02), 500, "; CPU2 by far the least: they wait for it"),
        ((0.60, 0.55, 0.02), 12, ""),
        ((0.60, 0.02, 0.02), 500, ""),
    ],
)
def test_ranks_wait_for_one_that_waits_much_less_than_all_others_in_many_steps(
    shares: tuple[float, ...], steps: int, whom: str
) -> None:
    ranks = [worker(f"CPU{n}", steps=steps, waiting=share) for n, share in enumerate(shares)]
    each = ", ".join(f"CPU{n} {share:.0%}" for n, share in enumerate(shares))
    assert [*waits(ranks)] == [f"ranks waited for each other: {each} of the time{whom}"]


def test_workers_that_wait_for_nobody_are_told_nothing_of_it() -> None:
    assert [*waits([worker("CPU0"), worker("CPU1")])] == []
    assert [*waits([worker("CPU0", waiting=0.5)])] == []


def test_the_wait_for_ranks_that_start_late_is_none_of_their_steps() -> None:
    facts = WorkerFacts()
    for number in range(20):
        ms, wait_ms = (3000.0, 2990.0) if number < WARM_UP else (10.0, 1.0)
        zero = {"loss": "0x0p+0", "grad_norm": "0x0p+0", "lr": 0.0, "tokens": 8}
        facts.record(Step(step=number, ms=ms, wait_ms=wait_ms, **zero))  # type: ignore[arg-type]
    assert facts.waiting == pytest.approx(0.1)
