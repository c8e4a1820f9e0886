"""What is written when, what goes, and what a failing disk does."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_check.engine.checkpoint import read_checkpoint, storing, write_checkpoint
from model_check.engine.state import snapshot
from model_check.engine.stop import EndedEarly, Terminated
from model_check.errors import NonFiniteError, StorageError
from tests.engine.conftest import FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("beside", ["true", "false"])
def test_the_newest_few_are_kept_and_never_what_is_not_ours(
    tiny_run: MakeRun, tmp_path: Path, beside: str
) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    foreign = ["best.pt", "nan_grad_step_1.pt", "notes.txt", "step_1.pt.txt", "step_900.pt"]
    for name in foreign:
        (directory / name).write_text("mine")
    tiny_run(
        training__max_steps=7,
        training__save_interval=1,
        training__keep_last=2,
        training__save_last="true",
        training__async_save=beside,
    )()
    assert names(directory) == sorted([*foreign, "last.pt", "step_6.pt", "step_7.pt"])
    assert all((directory / name).read_text() == "mine" for name in foreign)


def test_a_resumed_run_goes_on_counting_what_it_wrote_before(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / "step_1.pt").write_text("of another run")
    os.utime(directory / "step_1.pt", (1, 1))
    common = {"training__save_interval": 2, "training__keep_last": 2}
    tiny_run(training__max_steps=6, **common)()
    assert names(directory) == ["step_1.pt", "step_4.pt", "step_6.pt"]
    tiny_run(training__max_steps=8, training__resume="auto", **common)()
    assert names(directory) == ["step_1.pt", "step_6.pt", "step_8.pt"]


@pytest.mark.parametrize("beside", ["true", "false"])
def test_a_fresh_run_keeps_what_an_earlier_one_left_under_the_same_name(
    tiny_run: MakeRun, tmp_path: Path, beside: str
) -> None:
    directory = tmp_path / "checkpoints"
    saving = {
        "training__save_interval": 2,
        "training__save_last": "true",
        "training__async_save": beside,
    }
    tiny_run(**saving)()
    before = {name: (directory / name).read_bytes() for name in names(directory)}
    run = tiny_run(**saving, system__seed=7)()
    kept = {f"{Path(name).stem}.earlier.pt": content for name, content in before.items()}
    assert {name: (directory / name).read_bytes() for name in kept} == kept
    assert names(directory) == sorted([*before, *kept])
    told = [line for line in run.kept.lines if "is kept as" in line]
    assert told[-1] == f"An earlier run's last.pt is kept as {directory}/last.earlier.pt"
    assert len(told) == 3
    again = tiny_run(**saving, system__seed=7, training__resume=directory / "step_2.pt")()
    assert not [line for line in again.kept.lines if "is kept as" in line]
    assert {name: (directory / name).read_bytes() for name in kept} == kept


def test_both_ways_of_writing_write_the_same(tiny_run: MakeRun, tmp_path: Path) -> None:
    states = []
    for beside in ("true", "false"):
        tiny_run(
            directory=tmp_path / beside, training__save_interval=2, training__async_save=beside
        )()
        states.append(read_checkpoint(tmp_path / beside / "step_2.pt"))
    one, other = states
    assert all(torch.equal(w, other["model"][n]) for n, w in one["model"].items())
    assert one["rng"]["python"] == other["rng"]["python"]
    assert one["step"] == other["step"] == 2


def test_a_snapshot_does_not_change_with_the_training_and_keeps_what_is_shared() -> None:
    weight = torch.ones(3)
    copy = snapshot({"a": weight, "tied": weight[:], "plain": [1, ("x", weight)]})
    weight.add_(1)
    assert copy["a"].tolist() == [1.0, 1.0, 1.0]
    assert copy["tied"] is copy["a"]
    assert copy["plain"] == [1, ("x", copy["a"])]


@pytest.mark.parametrize("beside", ["true", "false"])
def test_a_write_that_fails_ends_the_run(tiny_run: MakeRun, tmp_path: Path, beside: str) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    run = tiny_run(training__save_interval=1, training__async_save=beside)
    with pytest.raises(StorageError, match=r"step_1\.pt: cannot be written: .*checkpoint_dir"):
        run()
    assert len(run.bits()) < 4


LARGE = {"model__hidden_size": 64, "model__intermediate_size": 96}
"""About 420 KB a checkpoint: two fit a disk of 1 MiB, the third is cut short."""


@pytest.mark.parametrize("beside", ["true", "false"])
def test_a_disk_that_fills_up_ends_the_run_and_leaves_what_is_whole(
    tiny_run: MakeRun, small_disk: Path, beside: str
) -> None:
    run = tiny_run(
        directory=small_disk, training__save_interval=1, training__async_save=beside, **LARGE
    )
    with pytest.raises(StorageError, match=r"step_3\.pt: .*the disk is full \([\d.]+ MiB"):
        run()
    assert names(small_disk) == ["step_1.pt", "step_2.pt"]
    resumed = tiny_run(directory=small_disk, training__resume="auto", **LARGE)
    assert resumed.trainer.state.progress.step == 2


def test_a_disk_that_is_full_in_the_middle_of_torchs_own_writer_is_called_full(
    small_disk: Path,
) -> None:
    """Where the cut falls depends on the sizes of all that is in a checkpoint."""
    content = {"a": torch.zeros(1 << 18)}
    for size in range(0, 1 << 14, 1 << 11):
        (small_disk / "others").write_bytes(b"x" * size)
        with pytest.raises(StorageError, match="the disk is full"):
            write_checkpoint(small_disk / "last.pt", content | {"b": "y" * size})


def test_a_full_disk_does_not_hide_a_nan(tiny_run: MakeRun, small_disk: Path) -> None:
    (small_disk / "others").write_bytes(b"x" * (900 << 10))
    run = tiny_run(directory=small_disk, debug__drill="nan@1", debug__dump_tensors="true", **LARGE)
    with pytest.raises(NonFiniteError, match="step 1"):
        run()
    told = [line.split(" not saved")[0] for line in run.kept.lines if "not saved" in line]
    assert told == ["Checkpoint", "Debug tensors"]
    assert names(small_disk) == ["debug", "dossier", "others"]


def test_a_gpu_that_fails_while_it_is_saved_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(torch.AcceleratorError, match="illegal"), storing(tmp_path / "last.pt"):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_write_that_fails_hides_no_other_failure(tiny_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    run = tiny_run(training__save_interval=3, training__async_save="true", debug__drill="nan@3")
    with pytest.raises(NonFiniteError):
        run()
    assert any(line.startswith("Checkpoint not saved: ") for line in run.kept.lines)


def test_the_run_waits_for_what_is_being_written(tiny_run: MakeRun, tmp_path: Path) -> None:
    tiny_run(training__save_interval=4, training__async_save="true")()
    assert names(tmp_path / "checkpoints") == ["step_4.pt"]
    assert not [thread for thread in threading.enumerate() if thread.name == "save"]


def noticing(run: Run, at: int) -> Callable[[int], FakeBatch]:
    def make(number: int) -> FakeBatch:
        if number == at:
            run.stop.notice = 10
        return FakeSource().random(number)

    return make


def test_a_young_leftover_is_removed_once_it_is_old_enough(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    leftover = tmp_path / "checkpoints" / ".step_9.pt.77.tmp"
    leftover.parent.mkdir()
    leftover.touch()
    run = tiny_run()

    def ageing(number: int) -> FakeBatch:
        assert leftover.exists()
        os.utime(leftover, (1, 1))
        return FakeSource().random(number)

    run.source.make = ageing
    run()
    assert not leftover.exists()


def test_a_notice_is_acted_on_only_where_that_was_asked_for(tiny_run: MakeRun) -> None:
    run = tiny_run(training__max_steps=6)
    run.source.make = noticing(run, at=2)
    run()
    assert len(run.bits()) == 6


def test_a_notice_ends_the_run_well_with_a_checkpoint_to_go_on_from(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    whole = tiny_run(training__max_steps=6, directory=tmp_path / "whole")()
    run = tiny_run(training__max_steps=6, training__save_on_signal="true", lag=1)
    run.source.make = noticing(run, at=2)
    with pytest.raises(EndedEarly, match=r"ended early by SIGUSR1: 3 of 6 steps, saved"):
        run()
    assert names(tmp_path / "checkpoints") == ["last.pt"]
    assert run.source.closed
    rest = tiny_run(training__max_steps=6, training__resume="auto")()
    assert run.bits() + rest.bits() == whole.bits()


def test_a_run_that_is_cut_short_while_it_writes_waits_for_the_file(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    run = tiny_run(training__save_interval=2, training__async_save="true", training__max_steps=6)

    def stopping(number: int) -> FakeBatch:
        if number == 2:  # the writer of step_2.pt has just begun
            raise Terminated(15)
        return FakeSource().random(number)

    run.source.make = stopping
    with pytest.raises(Terminated):
        run()
    assert names(tmp_path / "checkpoints") == ["step_2.pt"]
    assert read_checkpoint(tmp_path / "checkpoints" / "step_2.pt")["step"] == 2


def test_a_signal_to_stop_saves_nothing(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = tiny_run(training__max_steps=6, training__save_on_signal="true")
    run.source.make = noticing(run, at=2)
    run.stop.signum = 15
    with pytest.raises(Terminated):
        run()
    assert not (tmp_path / "checkpoints").exists()
