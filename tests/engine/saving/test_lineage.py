"""Whose a checkpoint is, and which is the newest: what is inside decides, no clock and no name."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.engine.checkpoint import read_checkpoint, write_checkpoint
from model_check.engine.saving.lineage import contents_of, newest_first, state_sum
from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import content_of
from tests.engine.conftest import Run, make_settings

MakeRun = Callable[..., Run]
SAVES: dict[str, Any] = {"training__save_interval": 4, "training__save_last": "true"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def resumed(run: Run) -> str:
    """The name and step of the checkpoint that a run goes on from."""
    progress = run.trainer.state.progress
    return f"{progress.resumed.name if progress.resumed else None} {progress.step}"


def change(path: Path, **changes: Any) -> None:
    write_checkpoint(path, read_checkpoint(path) | changes)


@pytest.mark.parametrize("how", ["copied", "set back"])
def test_no_clock_decides_which_is_the_newest(tiny_run: MakeRun, place: Path, how: str) -> None:
    """R2: `cp -r` gives files the times in which it comes to them; a clock may be set back."""
    tiny_run(training__max_steps=16, **SAVES)()
    for age, path in enumerate(sorted(place.iterdir())):
        os.utime(path, (10_000 - age, 10_000 - age))
    if how == "copied":
        place = shutil.copytree(place, place.with_name("copy"))
    run = tiny_run(training__max_steps=20, training__resume="auto", directory=place, **SAVES)
    assert resumed(run) == "last.pt 16"


def test_of_two_branches_of_a_run_the_later_one_goes_on(tiny_run: MakeRun, place: Path) -> None:
    """Somebody went back to step 4, and was killed at step 8; step 12 is of the branch before."""
    tiny_run(training__max_steps=12, **SAVES)()
    back = {"training__resume": place / "step_4.pt", "training__learning_rate": 1e-4}
    tiny_run(training__max_steps=8, training__save_interval=4, **back)()
    run = tiny_run(training__resume="auto", training__learning_rate=1e-4, training__max_steps=16)
    assert resumed(run) == "last.pt 8"


def test_a_run_that_did_not_save_leaves_the_one_before_to_go_on(
    tiny_run: MakeRun, place: Path
) -> None:
    tiny_run(training__max_steps=4, **SAVES)()
    tiny_run(training__max_steps=3)()
    assert resumed(tiny_run(training__resume="auto", training__max_steps=8)) == "last.pt 4"


@pytest.mark.parametrize("differ", ["system__seed", "training__learning_rate"])
def test_each_run_goes_on_with_its_own(tiny_run: MakeRun, place: Path, differ: str) -> None:
    """The second one began in the directory of the first when that had ended."""
    first, second = {differ: 1}, {differ: 2}
    tiny_run(training__max_steps=8, **SAVES, **first)()
    tiny_run(training__max_steps=4, **SAVES, **second)()
    assert sorted(path.name for path in place.iterdir()) == [
        *("last.earlier.pt", "last.pt", "step_4.earlier.pt", "step_4.pt", "step_8.pt")
    ]
    more = {"training__resume": "auto", "training__max_steps": 12}
    assert resumed(tiny_run(**more, **first)) == "last.earlier.pt 8"
    assert resumed(tiny_run(**more, **second)) == "last.pt 4"


def test_a_run_that_goes_on_keeps_what_another_one_left_under_its_names(
    tiny_run: MakeRun, place: Path
) -> None:
    """And removes none of it, though the names were in its own list."""
    few = {"training__save_interval": 4, "training__keep_last": 2, "training__max_steps": 8}
    tiny_run(system__seed=1, **few)()
    tiny_run(system__seed=2, **few)()  # step_4.pt and step_8.pt of the first are *.earlier.pt
    more = few | {"training__max_steps": 16, "training__resume": "auto"}
    run = tiny_run(system__seed=1, **more)
    assert resumed(run) == "step_8.earlier.pt 8"
    run()
    seeds = {h.path.name: h.settings["system"]["seed"] for h in contents_of(place).headers}
    assert seeds == {
        **{f"step_{number}.earlier.pt": 1 for number in (4, 8)},
        **{f"step_{number}.pt": 2 for number in (4, 8)},
        **{f"step_{number}.pt": 1 for number in (12, 16)},
    }


def test_a_worker_does_not_begin_afresh_beside_a_jobs_checkpoints(
    tiny_run: MakeRun, place: Path
) -> None:
    tiny_run(training__max_steps=4, **SAVES)()
    with pytest.raises(CheckpointError, match=f"`--resume {place}` goes on from there"):
        tiny_run(training__resume="auto", worker="GPU6", directory=place / "gpu6", launch="run")


def test_another_runs_checkpoint_is_resumed_by_nobody_unasked(
    tiny_run: MakeRun, place: Path
) -> None:
    tiny_run(training__max_steps=4, **SAVES)()
    with pytest.raises(CheckpointError, match="of another run"):
        tiny_run(training__resume="auto", system__seed=7)
    asked = {"training__resume": "auto", "training__resume_anyway": "true", "system__seed": 7}
    run = tiny_run(training__max_steps=8, **SAVES, **asked)
    assert resumed(run) == "last.pt 4"
    run()
    runs = {header.run_id for header in contents_of(place).headers}
    assert len(runs) == 2  # it is another run from there on: the old files are kept
    assert (place / "last.earlier.pt").exists()


def test_two_states_of_one_step_are_told(tiny_run: MakeRun, place: Path) -> None:
    tiny_run(training__max_steps=4, **SAVES)()
    run = tiny_run(training__resume="auto", training__max_steps=8)
    assert not [line for line in run.kept.lines if "another state" in line]
    model = read_checkpoint(place / "step_4.pt")["model"]
    change(place / "step_4.pt", model=model | {"norm.weight": model["norm.weight"] + 1})
    run = tiny_run(training__resume="auto", training__max_steps=8)
    assert (
        f"{place}/last.pt is resumed; another state of the same step is in {place}/step_4.pt"
        in run.kept.lines
    )


def make_older(place: Path) -> None:
    """As an older version wrote them: without run and attempt."""
    for path in place.iterdir():
        old = read_checkpoint(path)
        for name in ("run_id", "attempt", "launch"):
            del old[name]
        write_checkpoint(path, old)


def test_checkpoints_of_an_older_version_are_resumed(tiny_run: MakeRun, place: Path) -> None:
    tiny_run(training__max_steps=8, **SAVES)()
    make_older(place)
    run = tiny_run(training__max_steps=12, training__resume="auto", **SAVES)
    assert resumed(run) == "last.pt 8"
    run()
    assert not list(place.glob("*.earlier.pt"))  # it is one run
    assert resumed(tiny_run(training__resume="auto", training__max_steps=16)) == "last.pt 12"


@pytest.mark.parametrize("seed", [42, 7])
def test_what_an_older_version_kept_as_earlier_is_not_the_newest(
    tiny_run: MakeRun, place: Path, seed: int
) -> None:
    tiny_run(training__max_steps=16, **SAVES)()
    tiny_run(training__max_steps=8, system__seed=seed, **SAVES)()
    (place / "step_12.pt").unlink()
    (place / "step_16.pt").unlink()
    make_older(place)
    run = tiny_run(training__max_steps=20, training__resume="auto", system__seed=seed)
    assert resumed(run) == "last.pt 8"


def test_going_back_in_a_run_loses_nothing_of_the_branch_that_is_left(
    tiny_run: MakeRun, place: Path, tmp_path: Path
) -> None:
    """Also from a copy that lies elsewhere."""
    tiny_run(training__max_steps=16, **SAVES)()
    copy = shutil.copy(place / "step_4.pt", tmp_path / "step_4.pt")
    run = tiny_run(training__max_steps=8, training__resume=copy, **SAVES)()
    steps = {header.path.name: header.step for header in contents_of(place).headers}
    assert steps == {
        **{f"step_{number}.pt": number for number in (4, 8, 12, 16)},
        **{"last.pt": 8, "last.earlier.pt": 16, "step_8.earlier.pt": 8},
    }
    assert f"An earlier run's last.pt is kept as {place}/last.earlier.pt" in run.kept.lines
    assert resumed(tiny_run(training__resume="auto", training__max_steps=20)) == "last.pt 8"


def test_a_run_that_goes_on_with_other_settings_is_a_run_of_its_own(
    tiny_run: MakeRun, place: Path
) -> None:
    """So the first one still finds its own last state."""
    first, second = {"training__learning_rate": 1e-3}, {"training__learning_rate": 1e-4}
    tiny_run(training__max_steps=8, **SAVES, **first)()
    tiny_run(training__max_steps=12, training__resume="auto", **SAVES, **second)()
    more = {"training__resume": "auto", "training__max_steps": 16}
    assert resumed(tiny_run(**more, **first)) == "last.earlier.pt 8"
    assert resumed(tiny_run(**more, **second)) == "last.pt 12"


def test_a_third_run_keeps_both_before_it_unless_the_settings_are_equal(
    tiny_run: MakeRun, place: Path
) -> None:
    only_last = {"training__max_steps": 2, "training__save_last": "true"}
    for seed in (1, 2, 3, 3, 3):
        tiny_run(system__seed=seed, **only_last)()
    seeds = {h.path.name: h.settings["system"]["seed"] for h in contents_of(place).headers}
    assert seeds == {"last.earlier.pt": 1, "last.earlier2.pt": 2, "last.earlier3.pt": 3} | {
        "last.pt": 3
    }


def test_a_newer_run_that_is_passed_over_is_told(tiny_run: MakeRun, place: Path) -> None:
    tiny_run(training__max_steps=4, training__learning_rate=1e-4, **SAVES)()
    tiny_run(training__max_steps=8, training__learning_rate=3e-4, **SAVES)()
    again = {"training__resume": "auto", "training__learning_rate": 1e-4}
    run = tiny_run(training__max_steps=12, **again)
    assert resumed(run) == "last.earlier.pt 4"
    changed = "training.max_steps 8 -> 12, training.learning_rate 0.0003 -> 0.0001"
    assert f"Not resumed: {place}/last.pt: of another run: {changed}" in run.kept.lines


@pytest.mark.parametrize(
    "strange",
    [
        {"step": 5, "settings": torch.zeros(2)},
        {"step": 5, "settings": {"model": {"num_layers": torch.zeros(2)}, "training": {}}},
        [1, 2],
    ],
)
def test_a_strange_file_disturbs_no_run(tiny_run: MakeRun, place: Path, strange: Any) -> None:
    place.mkdir()
    torch.save(strange, place / "step_1.pt")
    tiny_run(training__max_steps=4, **SAVES)()
    assert resumed(tiny_run(training__resume="auto", training__max_steps=8)) == "last.pt 4"


@pytest.mark.parametrize("where", ["gpu6", "."])
def test_a_directory_is_searched_from_a_numbered_place_too(
    tiny_run: MakeRun, tmp_path: Path, where: str
) -> None:
    """An empty directory of the worker's own hides nothing."""
    before, here = tmp_path / "before", tmp_path / "now" / "gpu6_2"
    tiny_run(directory=before / where, **SAVES)()
    (before / "gpu6").mkdir(exist_ok=True)
    run = tiny_run(training__resume=before, directory=here, training__max_steps=8)
    assert resumed(run) == "last.pt 4"


def test_what_cannot_be_read_is_tried_where_it_may_be_the_newest(
    tiny_run: MakeRun, place: Path
) -> None:
    tiny_run(training__max_steps=8, training__save_interval=4)()
    for name in ("step_3.pt", "step_12.pt", "last.pt", "last.earlier.pt", "step_07.pt", "x.pt"):
        (place / name).touch()
    names = [path.name for path in newest_first(place)]
    assert names == ["last.pt", "step_12.pt", "step_8.pt", "step_4.pt", "step_3.pt"]
    assert newest_first(place / "none") == []


def test_a_name_of_the_content_changes_with_any_tensor_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    weights = torch.arange(6.0)
    for path, step in ((one, 1), (other, 2)):
        write_checkpoint(path, {"model": {"a": weights}, "step": step})
    assert state_sum(one) == state_sum(other)
    assert content_of(one) != content_of(other)
    weights[5] = 7
    write_checkpoint(other, {"model": {"a": weights}, "step": 1})
    assert state_sum(one) != state_sum(other)
    assert content_of(tmp_path / "none.pt") == ""


def test_settings_of_one_run_fit_it_whatever_max_steps_says(tiny_run: MakeRun, place: Path) -> None:
    """Two runs fit alike but for that one was extended and the other has another rate."""
    tiny_run(training__max_steps=4, **SAVES)()
    tiny_run(training__max_steps=8, training__learning_rate=1e-5, **SAVES)()
    settings = make_settings(training__max_steps=8)
    steps = [lineage.headers[0].step for lineage in contents_of(place).lineages(settings)]
    assert steps == [4, 8]
