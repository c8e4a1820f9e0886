"""The profile: of the steps that were asked for, as a file that a browser opens."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from model_check.errors import NonFiniteError
from model_check.events import Note
from tests.engine.conftest import Run
from tests.engine.saving.test_resume import SPLITS

MakeRun = Callable[..., Run]
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11


def test_the_steps_that_were_asked_for_are_profiled(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = tiny_run(debug__profile_steps="1-2")()
    path = tmp_path / "checkpoints" / "profile" / "steps_1-2.json.gz"
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event["name"] == "aten::_fused_adamw_" for event in events) == 2 * 2  # two groups
    (line,) = (line for line in run.kept.lines if line.startswith("Profile of steps 1 to 2:"))
    assert str(path) in line
    assert line in [event.text for event in run.kept.events if isinstance(event, Note)]


def test_a_profile_of_an_earlier_run_stays(tiny_run: MakeRun, tmp_path: Path) -> None:
    for _ in range(2):
        tiny_run(debug__profile_steps="1")()
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "profile").iterdir())
    assert names == ["steps_1-1.json.earlier1.gz", "steps_1-1.json.gz"]


def test_the_last_step_can_be_profiled_and_no_bit_changes(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    assert tiny_run(debug__profile_steps="3")().bits() == tiny_run()().bits()
    assert (tmp_path / "checkpoints" / "profile" / "steps_3-3.json.gz").exists()


def test_a_run_that_ends_while_it_is_profiled_leaves_what_it_has(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError):
        tiny_run(debug__profile_steps="0-3", debug__drill="nan@1")()
    assert (tmp_path / "checkpoints" / "profile" / "steps_0-1.json.gz").exists()


def test_a_profile_that_cannot_be_written_hides_no_failure(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "profile").write_text("a file where the directory should be")
    run = tiny_run(debug__profile_steps="0-3", debug__drill="nan@1")
    with pytest.raises(NonFiniteError):
        run()
    assert any(line.startswith("Profile of steps 0 to 1 not saved: ") for line in run.kept.lines)


def test_an_evaluation_between_profiled_steps_is_not_recorded(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoints" / "profile" / "steps_0-3.json.gz"
    counts = []
    for evaluation in ({}, {"training__eval_interval": 2, "splits": SPLITS}):
        tiny_run(debug__profile_steps="0-3", training__save_interval=1, **evaluation)()
        with gzip.open(path) as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        counts.append({name: names.count(name) for name in ("aten::mm", "aten::embedding")})
    assert counts[0] == counts[1]
    assert counts[0]["aten::embedding"] == 4
