"""A golden file is a peer for runs that have too few. What it makes of a run, row by row, is in
tests/launcher/verdict/test_golden.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from tests.e2e.conftest import TINY, Launcher, Run, scripted_in
from tests.e2e.test_verdict import NORM, with_drills
from tests.launcher.report.report_schema import faults

FLIP = f"flip_gradient@2:all:{NORM}:3"


def in_eight_steps(launcher: Launcher) -> Launcher:
    """Its runs have the settings of the golden file."""
    settings = TINY | {"training": {**TINY["training"], "max_steps": 8}}
    settings["system"] = {**TINY["system"], "num_threads": 1}
    launcher.config.write_text(json.dumps(settings))
    return launcher


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Path:
    """Of three workers that agreed."""
    launcher = in_eight_steps(scripted_in(tmp_path_factory.mktemp("golden"), token_cache))
    run = launcher("--workers=3")
    assert run.exit_code == 0, run.output
    written = launcher.verb("report", "run", "--write-golden", "golden.json")
    assert written.returncode == 0, written.stdout
    assert "golden file golden.json: 8 steps of CPU0, CPU1 and CPU2" in written.stdout
    return launcher.cwd / "golden.json"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """A run of one worker that passed."""
    launcher = in_eight_steps(scripted_in(tmp_path_factory.mktemp("alone"), token_cache))
    run = launcher("--workers=1")
    assert run.exit_code == 0, run.output
    assert "one worker, so nothing to compare it with" in run.output
    return run


@pytest.fixture
def eight(scripted: Launcher) -> Launcher:
    return in_eight_steps(scripted)


def told(run: Run, capfd: pytest.CaptureFixture[str], *options: str) -> Run:
    """What `report` makes of it."""
    code = main(["report", str(run.directory), *options])
    return Run(code, "".join(capfd.readouterr()), run.directory, run.cwd)


def row(run: Run, worker: str) -> tuple[Any, ...]:
    (found,) = (w for w in run.report()["workers"] if w["name"] == worker)
    return tuple(found[key] for key in ("verdict", "cause_class", "severity"))


def standing(run: Run, worker: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = (w for w in run.report()["golden"]["workers"] if w["name"] == worker)
    return found


def test_a_real_run_is_named_with_the_bit_in_which_it_differs_from_an_earlier_one(
    launcher: Launcher,
) -> None:
    """Its last step has the fingerprint of each tensor; its report says so again."""
    assert launcher("--workers=1").exit_code == 0
    forced = launcher.verb("report", "run", "--write-golden", "golden.json", "--force")
    assert forced.returncode == 0, forced.stdout
    kept = f"launch.history_file={launcher.cwd / 'history.jsonl'}"
    asked = ("--golden", "golden.json", f"debug.drill=flip_gradient@3:all:{NORM}:3")
    run = launcher(*asked, "--workers=1", kept, "--run-dir", "second")
    assert run.exit_code == 21, run.output
    run = replace(run, directory=launcher.cwd / "second")
    assert row(run, "CPU0") == ("SUSPECT", "unknown", "MONITOR")
    assert run.report()["culprits"] == ["CPU0"]
    assert f"the gradient of {NORM} (bit 3 of value 0)" in run.report()["summary"]
    assert json.loads((launcher.cwd / "history.jsonl").read_text())["verdict"] == "SUSPECT"
    before = run.report()
    assert launcher.verb("report", "second").returncode == 21
    assert run.report() == before


def test_a_worker_alone_passes_with_a_golden_file_as_its_peer(
    alone: Run, golden: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = told(alone, capfd, "--golden", str(golden))
    assert run.exit_code == 0, run.output
    found = standing(run, "CPU0")
    assert (found["equal_steps"], found["disagreement"], found["others"]) == (8, None, [])
    assert found["speed"] > 0
    scope = run.report()["scope"]
    assert (scope["compared_steps"], scope["golden"]) == (8, str(golden))
    assert f"8 of 8 steps of golden {golden}" in run.report()["summary"]
    assert "nothing to compare" not in run.output
    assert run.lines("[launcher] golden: CPU0: equal in 8 of 8 steps")
    page = (run.directory / "report.html").read_text()
    assert "CPU0: equal in 8 of 8 steps" in page
    assert faults(run.report()) == []


def test_another_version_is_not_comparable_and_no_fail(
    alone: Run, golden: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(golden.read_text())
    ours = document["key"]["torch"]
    document["key"]["torch"] = "2.12.0"
    (tmp_path / "older.json").write_text(json.dumps(document))
    run = told(alone, capfd, "--golden", str(tmp_path / "older.json"))
    assert run.exit_code == 75, run.output
    assert run.report()["verdict"] == "INCONCLUSIVE"
    assert row(run, "CPU0") == ("INCONCLUSIVE", "unknown", "IGNORE")
    expected = [{"name": "torch", "golden": "2.12.0", "here": ours}]
    assert standing(run, "CPU0")["others"] == expected
    assert f"not comparable: torch 2.12.0 there, {ours} here" in run.output


def test_a_run_holds_itself_against_the_file_while_it_trains(eight: Launcher, golden: Path) -> None:
    run = eight("--workers=1", "--golden", str(golden), f"debug.drill={FLIP}")
    assert run.exit_code == 21, run.output
    assert row(run, "CPU0") == ("SUSPECT", "unknown", "MONITOR")
    found = standing(run, "CPU0")
    assert found["equal_steps"] == 2
    assert (found["disagreement"]["step"], found["disagreement"]["quantity"]) == (2, "gradients")
    assert run.lines("[launcher] golden: CPU0: other bits from step 2 on (gradients)")
    assert "the hardware, or a change of software that no key tells" in run.output
    assert faults(run.report()) == []
    page = (run.directory / "report.html").read_text()
    assert "step 2" in page
    assert "replay" in page


def test_it_tells_which_of_two_that_differ_is_the_odd_one(
    eight: Launcher, golden: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it was without the file is not lost, and comes again without it."""
    differed = with_drills(eight, 2, {"CPU0": FLIP})
    assert differed.exit_code == 23
    run = told(differed, capfd, "--golden", str(golden))
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU0"]
    assert row(run, "CPU0") == ("SUSPECT", "unknown", "MONITOR")
    assert run.verdicts()["CPU1"] in ("PASS", "STOPPED")
    assert f"golden {golden} tells that CPU0 is the odd one" in run.report()["summary"]
    assert run.lines("[launcher] golden: CPU1: equal in ")
    assert told(differed, capfd).exit_code == 23


def test_all_workers_that_differ_alike_are_no_gpus_fault(eight: Launcher, golden: Path) -> None:
    run = eight("--workers=3", f"--golden={golden}", f"debug.drill={FLIP}")
    assert run.exit_code == 2, run.output
    assert run.report()["verdict"] == "INVALID"
    assert run.report()["culprits"] == []
    assert {row(run, name) for name in run.verdicts()} == {("INVALID", "software", "IGNORE")}
    assert "the software, not a GPU: every worker differs" in run.report()["summary"]


def test_other_settings_are_named(eight: Launcher, golden: Path) -> None:
    other = ("model.init_std=0.03", "--max-steps=4")
    run = eight("--workers=1", f"launch.golden={golden}", *other)
    assert run.exit_code == 75, run.output
    keys = {other["name"] for other in standing(run, "CPU0")["others"]}
    assert keys == {"model.init_std", "training.max_steps"}


def test_no_file_is_made_of_a_run_that_proves_little(eight: Launcher) -> None:
    assert eight("--workers=2", f"debug.drill=flip_gradient@2:CPU1:{NORM}:3").exit_code == 23
    refused = eight.verb("report", "run", "--write-golden", "golden.json")
    assert refused.returncode == 2
    assert "its verdict is INCONCLUSIVE (exit code 23)" in refused.stdout
    assert "it is a drill" in refused.stdout
    assert "CPU0 and CPU1 agreed, and 3 are needed" in refused.stdout
    assert "2 of 8 steps were compared" in refused.stdout
    assert not (eight.cwd / "golden.json").exists()
    forced = eight.verb("report", "run", "--write-golden", "golden.json", "--force")
    assert forced.returncode == 23, forced.stdout
    document = json.loads((eight.cwd / "golden.json").read_text())
    assert [step["step"] for step in document["steps"]] == [0, 1]
    assert document["source"]["forced"].startswith("its verdict is INCONCLUSIVE")


def test_a_file_that_cannot_serve_is_refused_before_the_start(
    eight: Launcher, golden: Path
) -> None:
    for arguments, message in (
        (("--golden", "absent.json"), "absent.json: no golden file: No such file or directory"),
        (("--golden", "tiny.json"), "tiny.json: damaged, or no golden file"),
        (("--golden", str(golden), "--", "true"), "it would be compared with nothing"),
        (("--golden", str(golden), "system.deterministic=false"), "compared with nothing"),
    ):
        run = eight("--workers=1", *arguments)
        assert run.exit_code == 2, run.output
        assert message in run.output
        assert not run.directory.exists()
