"""`--deadline`: the run is over by then, and judged by what it did until then."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher, Run
from tests.e2e.test_run import read_until

DEADLINES_S = (6, 40, 100)
RESTING = {"RESTS": "0.1"}
"""Steps until the deadline: hundreds, not thousands."""


def run_until(scripted: Launcher, has_come: Callable[[Run], bool], *asked: str, **env: str) -> Run:
    """A run whose deadline comes after what a test wants: how soon that is, is the machine's."""
    for deadline_s in DEADLINES_S:
        run = scripted(*asked, f"--deadline={deadline_s}", **env)
        if has_come(run):
            return run
        shutil.rmtree(run.directory)
    raise AssertionError(f"not within {deadline_s} s:\n{run.output}")


def compared_enough(run: Run) -> bool:
    scope = run.report()["scope"]
    return scope is not None and scope["compared_steps"] >= 10


def test_with_enough_steps_it_passes(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    run = run_until(scripted, compared_enough, "--max-steps=100000", **RESTING)
    assert run.exit_code == 0, run.output
    assert set(run.verdicts().values()) <= {"PASS", "WARN"}  # one may be slow, on a busy machine
    assert "the deadline came before all 100,000 steps" in run.output
    assert re.search(
        r"the deadline of \d+ s is near: stopping 2 \(grace \d+(\.\d+)? s\)", run.output
    )
    assert alive(run.directory) == []


@pytest.mark.parametrize("drill", ["hang@3:CPU1", "hang@3:all"])
def test_with_too_few_it_is_inconclusive(scripted: Launcher, drill: str) -> None:
    run = scripted(f"debug.drill={drill}", "--max-steps=100", "--deadline=5")
    assert run.exit_code == 75, run.output
    assert run.verdicts() == {"CPU0": "INCONCLUSIVE", "CPU1": "INCONCLUSIVE"}
    rows = run.report()["workers"]
    assert {(row["cause_class"], row["severity"]) for row in rows} == {("unknown", "IGNORE")}
    assert "the deadline came before enough was compared" in run.report()["summary"]
    assert run.report()["culprits"] == []


def test_before_anything_was_trained(scripted: Launcher, tmp_path: Path) -> None:
    run = scripted("--deadline=3", PREPARES_WHEN=str(tmp_path / "never"))
    assert run.exit_code == 75, run.output
    assert run.report()["verdict"] == "INCONCLUSIVE"
    assert "starting the training" not in run.output


def test_workers_that_heed_no_signal_are_killed_in_time(scripted: Launcher) -> None:
    env = RESTING | {"LINGERS": "CPU1"}
    run = run_until(scripted, compared_enough, "--max-steps=100000", "--grace=600", **env)
    assert run.exit_code == 0, run.output
    assert re.search("still alive, so SIGKILL: .*CPU1", run.output), run.output


def test_a_failure_before_it_is_what_it_was(scripted: Launcher) -> None:
    run = scripted("debug.drill=flip@2:CPU1", "--deadline=100")
    assert run.exit_code == 21, run.output
    assert run.verdicts()["CPU1"] == "SUSPECT"


def test_a_nan_that_is_still_settled_then_is_that_workers(scripted: Launcher) -> None:
    """Its peer stands still before that step, and would have had its time."""
    env = {"STOPS_AFTER": "CPU0 1", "SETTLES": "600"}

    def is_settled(run: Run) -> bool:
        return "CPU1 failed in step 3: 600 s at most for CPU0" in run.output

    run = run_until(scripted, is_settled, "debug.drill=nan@3:CPU1", "launch.max_lead=6", **env)
    assert run.exit_code == 20, run.output
    assert run.report()["culprits"] == ["CPU1"]


def test_rounds_that_end_in_the_preparation_give_no_rate(
    scripted: Launcher, tmp_path: Path
) -> None:
    never = {"PREPARES_WHEN": str(tmp_path / "never")}
    run = scripted("--repeat=2", "--deadline=3", **never)
    assert run.exit_code == 75, run.output
    assert "rounds and report: " in run.output
    assert "of 0 rounds" not in run.output


def test_a_command_of_ones_own_that_is_not_done_by_then(scripted: Launcher) -> None:
    run = scripted("--deadline=2", "--", "sleep", "1000")
    assert run.exit_code == 75, run.output
    assert set(run.verdicts().values()) == {"INCONCLUSIVE"}


def test_one_that_is_no_time_is_refused(scripted: Launcher) -> None:
    run = scripted("--deadline=soon")
    assert run.exit_code == 2
    assert "--deadline: 'soon' is no time: give seconds, or 90s, 30m, 8h" in run.output


def test_a_report_made_again_says_the_same(scripted: Launcher) -> None:
    process = scripted.start("--max-steps=100000", "--deadline=5", **RESTING)
    seen = read_until(process, "the deadline of 5 s is near")
    run = scripted.finish(process, seen)
    before = run.report()["summary"]
    assert scripted.verb("report", "run").returncode == run.exit_code
    assert run.report()["summary"] == before
