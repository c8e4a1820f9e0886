"""A golden file is a peer for runs that have too few: real trainers, and the real command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TINY, Launcher, Run
from tests.e2e.test_verdict import NORM, with_drills
from tests.launcher.report.report_schema import faults

THREADS = "system.num_threads=1"
FLIP = f"flip_gradient@2:all:{NORM}:3"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Path:
    """Of three workers that agreed."""
    here = tmp_path_factory.mktemp("golden")
    (here / "tiny.json").write_text(json.dumps(TINY))
    launcher = Launcher(here, token_cache, here / "tiny.json")
    run = launcher("--workers=3", "--max-steps=8", THREADS)
    assert run.exit_code == 0, run.output
    written = launcher.verb("report", "run", "--write-golden", "golden.json")
    assert written.returncode == 0, written.stdout
    assert "golden file golden.json: 8 steps of CPU0, CPU1 and CPU2" in written.stdout
    return here / "golden.json"


@pytest.fixture
def eight(launcher: Launcher) -> Launcher:
    """Its runs have the settings of the golden file."""
    settings = TINY | {"training": {**TINY["training"], "max_steps": 8}}
    settings["system"] = {**TINY["system"], "num_threads": 1}
    launcher.config.write_text(json.dumps(settings))
    return launcher


def held(launcher: Launcher, golden: Path) -> Run:
    """The report of its run, against a golden file."""
    done = launcher.verb("report", "run", "--golden", str(golden))
    return Run(done.returncode, done.stdout, launcher.cwd / "run", launcher.cwd)


def row(run: Run, worker: str) -> tuple[Any, ...]:
    (found,) = (w for w in run.report()["workers"] if w["name"] == worker)
    return tuple(found[key] for key in ("verdict", "cause_class", "severity"))


def standing(run: Run, worker: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = (w for w in run.report()["golden"]["workers"] if w["name"] == worker)
    return found


def test_a_worker_alone_passes_with_a_golden_file_as_its_peer(
    eight: Launcher, golden: Path
) -> None:
    alone = eight("--workers=1")
    assert "one worker, so nothing to compare it with" in alone.output
    run = held(eight, golden)
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


def test_a_worker_alone_that_differs_is_a_suspect(eight: Launcher, golden: Path) -> None:
    assert eight("--workers=1", f"debug.drill={FLIP}").exit_code == 0
    run = held(eight, golden)
    assert run.exit_code == 21, run.output
    assert row(run, "CPU0") == ("SUSPECT", "unknown", "MONITOR")
    assert run.report()["culprits"] == ["CPU0"]
    found = standing(run, "CPU0")
    assert found["equal_steps"] == 2
    assert faults(run.report()) == []
    assert (found["disagreement"]["step"], found["disagreement"]["quantity"]) == (2, "gradients")
    assert "the hardware, or a change of software that no key tells" in run.output
    page = (run.directory / "report.html").read_text()
    assert "step 2" in page
    assert "replay" in page
    # What it was without the file is not lost.
    assert eight.verb("report", "run").returncode == 0


def test_the_tensor_is_named_where_the_last_step_differs(eight: Launcher, golden: Path) -> None:
    last = f"flip_gradient@7:all:{NORM}:3"
    assert eight("--workers=1", f"debug.drill={last}").exit_code == 0
    run = held(eight, golden)
    assert run.exit_code == 21, run.output
    assert f"the gradient of {NORM} (bit 3 of value 0)" in run.report()["summary"]


@pytest.mark.parametrize("odd", ["CPU0", "CPU1"])
def test_it_tells_which_of_two_that_differ_is_the_odd_one(
    eight: Launcher, golden: Path, odd: str
) -> None:
    assert with_drills(eight, 2, {odd: FLIP}).exit_code == 23
    run = held(eight, golden)
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == [odd]
    other = {"CPU0": "CPU1", "CPU1": "CPU0"}[odd]
    assert row(run, odd) == ("SUSPECT", "unknown", "MONITOR")
    assert run.verdicts()[other] in ("PASS", "STOPPED")
    assert f"golden {golden} tells that {odd} is the odd one" in run.report()["summary"]


def test_of_three_it_agrees_with_the_majority(eight: Launcher, golden: Path) -> None:
    assert with_drills(eight, 3, {"CPU1": FLIP}).exit_code == 21
    before = eight.verb("report", "run")
    run = held(eight, golden)
    assert run.exit_code == before.returncode == 21, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert run.lines("[launcher] golden: CPU0, CPU2: equal in ")
    assert run.lines("[launcher] golden: CPU1: other bits from step 2 on (gradients)")


def test_all_workers_that_differ_alike_are_no_gpus_fault(eight: Launcher, golden: Path) -> None:
    assert with_drills(eight, 3, dict.fromkeys(("CPU0", "CPU1", "CPU2"), FLIP)).exit_code == 0
    run = held(eight, golden)
    assert run.exit_code == 2, run.output
    assert run.report()["verdict"] == "INVALID"
    assert run.report()["culprits"] == []
    assert {row(run, name) for name in run.verdicts()} == {("INVALID", "software", "IGNORE")}
    assert "the software, not a GPU: every worker differs" in run.report()["summary"]


def test_a_majority_that_the_file_contradicts_names_nobody(eight: Launcher, tmp_path: Path) -> None:
    assert eight("--workers=1", f"debug.drill={FLIP}").exit_code == 0
    wrong = tmp_path / "wrong.json"
    assert eight.verb("report", "run", "--write-golden", str(wrong), "--force").returncode == 0
    (tmp_path / "run").rename(tmp_path / "before")
    assert with_drills(eight, 3, {"CPU1": FLIP}).exit_code == 21
    run = held(eight, wrong)
    assert run.exit_code == 23, run.output
    assert run.report()["culprits"] == []
    assert set(run.verdicts().values()) == {"INCONCLUSIVE"}


def test_another_version_is_not_comparable_and_no_fail(
    eight: Launcher, golden: Path, tmp_path: Path
) -> None:
    assert eight("--workers=2").exit_code == 0
    document = json.loads(golden.read_text())
    ours = document["key"]["torch"]
    document["key"]["torch"] = "2.12.0"
    (tmp_path / "older.json").write_text(json.dumps(document))
    run = held(eight, tmp_path / "older.json")
    assert run.exit_code == 75, run.output
    assert run.report()["verdict"] == "INCONCLUSIVE"
    assert {row(run, name) for name in run.verdicts()} == {("INCONCLUSIVE", "unknown", "IGNORE")}
    expected = [{"name": "torch", "golden": "2.12.0", "here": ours}]
    assert standing(run, "CPU0")["others"] == expected
    assert f"not comparable: torch 2.12.0 there, {ours} here" in run.output


def test_other_settings_are_named(eight: Launcher, golden: Path) -> None:
    assert eight("--workers=1", "model.init_std=0.03", "--max-steps=4").exit_code == 0
    run = held(eight, golden)
    assert run.exit_code == 75, run.output
    keys = {other["name"] for other in standing(run, "CPU0")["others"]}
    assert keys == {"model.init_std", "training.max_steps"}


def test_what_is_worse_stays(eight: Launcher, golden: Path) -> None:
    assert eight("--workers=1", "debug.drill=nan@3").exit_code == 20
    before = eight.verb("report", "run")
    run = held(eight, golden)
    assert run.exit_code == before.returncode == 20, run.output
    assert standing(run, "CPU0")["equal_steps"] == 3


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


def test_a_run_holds_itself_against_the_file_and_its_report_says_so_again(
    eight: Launcher, golden: Path
) -> None:
    history = eight.cwd / "history.jsonl"
    kept = f"launch.history_file={history}"
    run = eight("--workers=1", "--golden", str(golden), f"debug.drill={FLIP}", kept)
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU0"]
    assert run.lines("[launcher] golden: CPU0: other bits from step 2 on (gradients)")
    before = run.report()
    assert eight.verb("report", "run").returncode == 21
    assert run.report() == before
    assert json.loads(history.read_text())["verdict"] == "SUSPECT"


def test_a_run_alone_passes_beside_the_file(eight: Launcher, golden: Path) -> None:
    run = eight("--workers=1", f"launch.golden={golden}")
    assert run.exit_code == 0, run.output
    assert run.report()["scope"]["compared_steps"] == 8


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
