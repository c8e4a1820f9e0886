"""An error leaves the steps that were done in `error.pt`, and stays what it is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from model_check.engine.checkpoint import read_checkpoint
from model_check.engine.results import StepMetrics
from model_check.engine.saving.checkpoint_files import sweep_leftovers
from model_check.errors import BrokenStateError, NonFiniteError
from model_check.events import Evidence
from model_check.hooks.hook import RunObserver
from tests.engine.conftest import Run
from tests.engine.saving.test_resume import assert_equal_but_for_settings

MakeRun = Callable[..., Run]


@dataclass
class Failing(RunObserver):
    """Does something at a step, and fails."""

    at: int
    act: Callable[[], object] = lambda: None

    def on_result(self, metrics: StepMetrics) -> None:
        if metrics.step == self.at:
            self.act()
            raise OSError("the logger is gone")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def fail(run: Run, error: type[BaseException], text: str) -> list[str]:
    """What it said from its error on."""
    with pytest.raises(error, match=text):
        run()
    return run.kept.lines[-2:]


@pytest.mark.parametrize("lag", [0, 1])
def test_what_was_done_is_kept_and_goes_on_to_the_same_bits(
    tiny_run: MakeRun, directory: Path, tmp_path: Path, lag: int
) -> None:
    run = tiny_run(lag=lag, training__max_steps=4, debug__drill="raise@2")
    told, kept = fail(run, RuntimeError, "raised at step 2")
    assert told == "After 2 steps: RuntimeError: drill: raised at step 2"
    assert kept == f"Checkpoint saved: {directory / 'error.pt'}"
    evidence = [event for event in run.kept.events if isinstance(event, Evidence)]
    assert [item.path for item in evidence] == [str(directory / "error.pt")]
    last = {"training__max_steps": 4, "training__save_last": "true"}
    tiny_run(training__resume=str(directory / "error.pt"), **last)()
    whole = tmp_path / "whole"
    tiny_run(directory=whole, **last)()
    assert_equal_but_for_settings(directory / "last.pt", whole / "last.pt")


def test_an_observer_that_fails_costs_no_step(tiny_run: MakeRun, directory: Path) -> None:
    fail(tiny_run(observers=(Failing(1),)), OSError, "the logger is gone")
    assert read_checkpoint(directory / "error.pt")["step"] == 2


def test_an_earlier_one_stays(tiny_run: MakeRun, directory: Path) -> None:
    for at in (1, 2, 3):
        fail(tiny_run(debug__drill=f"raise@{at}"), RuntimeError, "raised")
    steps = {path.name: read_checkpoint(path)["step"] for path in directory.iterdir()}
    assert steps == {"error.earlier1.pt": 1, "error.earlier2.pt": 2, "error.pt": 3}


def test_before_the_first_step_is_done_there_is_nothing_to_keep(
    tiny_run: MakeRun, directory: Path
) -> None:
    fail(tiny_run(debug__drill="raise@0"), RuntimeError, "raised at step 0")
    fail(tiny_run(debug__drill="raise@2"), RuntimeError, "raised")
    resumed = {"training__resume": str(directory / "error.pt"), "debug__drill": "raise@2"}
    fail(tiny_run(**resumed), RuntimeError, "raised at step 2")
    assert [path.name for path in directory.iterdir()] == ["error.pt"]


def test_what_is_not_finite_or_half_done_is_not_kept(tiny_run: MakeRun, directory: Path) -> None:
    observer = Failing(1)
    run = tiny_run(observers=(observer,))
    observer.act = lambda: torch.nn.init.constant_(
        run.trainer.state.model.get_parameter("norm.weight"), float("nan")
    )
    *_, said = fail(run, OSError, "the logger is gone")
    assert said == "Checkpoint not saved: weights or moments are not finite"

    run = tiny_run()
    update, optimizer = run.trainer.state.optimizer._update, run.trainer.state.optimizer

    def tear(*given: object) -> None:
        if int(optimizer.num_steps) == 2 and given[0] is optimizer.blocks[-1]:
            raise RuntimeError("no kernel")
        update(*given)  # type: ignore[arg-type]

    optimizer._update = tear  # type: ignore[method-assign]
    *_, said = fail(run, RuntimeError, "no kernel")
    assert said == "Checkpoint not saved: the update of step 1 was not whole"
    assert not directory.exists()


def test_a_file_that_cannot_be_written_hides_no_error(tiny_run: MakeRun, directory: Path) -> None:
    directory.write_text("a file where the directory should be")
    *_, said = fail(tiny_run(debug__drill="raise@2"), RuntimeError, "raised at step 2")
    assert said.startswith(f"Checkpoint not saved: {directory}/error.pt: cannot be written")


@pytest.mark.parametrize(
    ("drill", "error"), [("nan@1", NonFiniteError), ("flip@1", BrokenStateError)]
)
def test_a_state_with_evidence_of_its_own_leaves_no_second_file(
    tiny_run: MakeRun, directory: Path, drill: str, error: type[Exception]
) -> None:
    fail(tiny_run(debug__drill=drill), error, "step 1|nothing in this program")
    assert not (directory / "error.pt").exists()


def test_what_a_killed_writer_left_is_removed(directory: Path) -> None:
    import os

    directory.mkdir()
    leftover = directory / ".error.pt.0123456789abcdef.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    sweep_leftovers(directory)
    assert not leftover.exists()
