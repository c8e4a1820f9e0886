"""What is written when, what goes, and what a failing disk does."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_check.engine.checkpoint import read_checkpoint, storing, write_checkpoint
from model_check.engine.memory import OutOfMemory
from model_check.engine.saving.staging import Staging
from model_check.engine.stop import EndedEarly, Terminated
from model_check.errors import NonFiniteError, StorageError
from model_check.hooks.hook import RunObserver
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
    again = tiny_run(**saving, system__seed=7, training__max_steps=6, training__resume="auto")()
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


def test_a_copy_does_not_change_with_the_training_and_keeps_what_is_shared(tmp_path: Path) -> None:
    weight, staging = torch.ones(3), Staging(torch.device("cpu"))
    kinds = {
        "a": weight,
        "tied": weight[:],
        "plain": [1, ("x", weight)],
        "step": torch.tensor(7.0),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    copy = staging.copy(kinds).wait()
    weight.add_(1)
    assert copy["a"].tolist() == [1.0, 1.0, 1.0]
    assert copy["tied"] is copy["a"]
    assert copy["plain"] == [1, ("x", copy["a"])]
    for name in ("step", "bytes", "transposed", "half", "none", "parameter"):
        assert torch.equal(copy[name], kinds[name].detach())  # type: ignore[attr-defined]
        assert copy[name].dtype == kinds[name].dtype  # type: ignore[attr-defined]
    torch.save(copy, tmp_path / "copy.pt")
    assert (tmp_path / "copy.pt").stat().st_size < 8192  # of the buffer, each its own part
    places = [tensor.data_ptr() for tensor in (copy["a"], copy["bytes"])]
    again = staging.copy(kinds | {"a": weight}).wait()
    assert [tensor.data_ptr() for tensor in (again["a"], again["bytes"])] == places
    assert again["a"].tolist() == [2.0, 2.0, 2.0]
    larger = staging.copy({"a": torch.ones(100_000)}).wait()
    assert larger["a"].sum() == 100_000
    staging.close()


def test_two_names_due_after_one_step_are_written_from_one_copy(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    copy = Staging.copy

    def counted(staging: Staging, state: dict[str, Any]) -> Any:
        copies.append(state["state"]["step"])
        return copy(staging, state)

    monkeypatch.setattr(Staging, "copy", counted)
    tiny_run(
        splits={"val": lambda: [FakeSource().random(77)]},
        training__save_interval=2,
        training__eval_interval=2,
        training__save_best="true",
        training__async_save="true",
    )()
    directory = tmp_path / "checkpoints"
    assert names(directory) == ["best.pt", "step_2.pt", "step_4.pt"]
    assert copies == [2, 4]
    best, last = (read_checkpoint(directory / name) for name in ("best.pt", "step_4.pt"))
    assert best["step"] == 4  # it learns: each evaluation is the best
    assert all(torch.equal(w, last["model"][n]) for n, w in best["model"].items())
    assert (best["kept"], last["kept"]) == (["step_2.pt"], ["step_2.pt"])


@dataclass
class Spoiling(RunObserver):
    """Something in a checkpoint whose writing fails."""

    act: Callable[[], object]

    def kept(self) -> dict[str, Any]:
        return {"spoilt": self}

    def __reduce__(self) -> Any:
        self.act()
        return str, ("written",)


def failing(error: BaseException) -> Callable[[Path], object]:
    def act(_: Path) -> None:
        raise error

    return act


def vanish(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.touch()


@pytest.mark.parametrize("beside", ["true", "false"])
@pytest.mark.parametrize(
    ("act", "kind", "said"),
    [
        (
            failing(OSError(errno.ENOSPC, "No space left on device")),
            StorageError,
            "No space left on device",
        ),
        (failing(PermissionError(errno.EACCES, "Permission denied")), StorageError, "denied"),
        (failing(MemoryError("no room")), OutOfMemory, "out of memory"),
        (failing(RuntimeError("a bug")), RuntimeError, "a bug"),
        (vanish, StorageError, "cannot be written"),
    ],
    ids=["full disk", "no permission", "no memory", "a bug", "no directory"],
)
def test_a_writer_that_fails_ends_the_run_as_what_it_is(
    tiny_run: MakeRun,
    tmp_path: Path,
    act: Callable[[Path], object],
    kind: type[Exception],
    said: str,
    beside: str,
) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    observer = Spoiling(lambda: act(directory))
    run = tiny_run(
        observers=(observer,),
        training__max_steps=40,
        training__save_interval=2,
        training__async_save=beside,
    )
    with pytest.raises(kind, match=said) as caught:
        run()
    assert type(caught.value) is kind
    assert len(run.bits()) < 40
    assert not [thread for thread in threading.enumerate() if thread.name == "save"]


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
    with pytest.raises(
        StorageError, match=r"step_3\.pt: .*No space left on device \([\d.]+ MiB and [\d,]+ inodes"
    ):
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
        with pytest.raises(StorageError, match="No space left on device"):
            write_checkpoint(small_disk / "last.pt", content | {"b": "y" * size})


def test_a_full_disk_does_not_hide_a_nan(tiny_run: MakeRun, small_disk: Path) -> None:
    (small_disk / "others").write_bytes(b"x" * (900 << 10))
    run = tiny_run(directory=small_disk, debug__drill="nan@1", debug__dump_tensors="true", **LARGE)
    with pytest.raises(NonFiniteError, match="step 1"):
        run()
    told = [line.split(" not saved")[0] for line in run.kept.lines if "not saved" in line]
    assert told == ["Checkpoint", "Debug tensors"]
    assert names(small_disk) == ["debug", "dossier", "others"]


class FakeStream:
    """As torch's streams are entered and wait: no GPU is here to try them."""

    current: "FakeStream"

    def __init__(self, *_: object) -> None:
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited.append(other)

    def record_event(self) -> str:
        return "done"


@contextmanager
def entered(stream: FakeStream | None) -> Iterator[None]:
    before, FakeStream.current = FakeStream.current, stream or FakeStream.current
    yield
    FakeStream.current = before


def test_the_copy_of_a_gpu_waits_for_what_the_training_has_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = FakeStream.current = FakeStream()
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    fakes = {"Stream": FakeStream, "stream": entered, "cudart": lambda: cudart}
    for name, fake in {**fakes, "current_stream": lambda *_: FakeStream.current}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    staging = Staging(torch.device("cuda"))
    staged = staging.copy({"weights": torch.ones(3)})
    assert vars(staging)["_stream"].waited == [training]
    assert staged.done == "done"
    staging.close()


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
