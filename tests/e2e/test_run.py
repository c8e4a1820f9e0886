"""The promises of README.md about a run, each once: real launcher, real workers, real training.

What the launcher does with what workers say: test_failures.py, with a scripted trainer."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher, Run, launcher_in
from tests.launcher.report.report_schema import faults

STEP_LINE = re.compile(
    r"\[CPU[01]\] Step \[\d+/4\] \| Loss: \d+\.\d{4} \| LR: \d\.\d\de[+-]\d\d "
    r"\| Grad Norm: \d+\.\d{4} \| ETA: \d+:\d\d"
)
EVIDENCE_OF_STEP_2 = ("nan_debug_step_2.pkl", "manifest.json", "nan_grad_step_2.pt")


def read_until(process: subprocess.Popen[str], *texts: str) -> str:
    """What a running launcher says, up to the first line that holds one of `texts`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if any(text in line for text in texts):
            break
    return seen


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """A run of two workers without a fault, after `prepare`. Its environment names another cache
    than its command line."""
    launcher = launcher_in(tmp_path_factory.mktemp("clean"), token_cache)
    prepared = launcher.verb("prepare", "--config", str(launcher.config))
    assert prepared.returncode == 0, prepared.stdout
    launcher.cache = launcher.cwd / "other"
    return launcher(f"data.cache_dir={token_cache}")


def test_a_clean_run_passes_compares_and_reports(
    clean: Run, alive: Callable[[Path], list[str]]
) -> None:
    assert clean.exit_code == 0, clean.output
    assert clean.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    for name in ("CPU0", "CPU1"):
        steps = [line for line in clean.lines(f"[{name}] Step") if STEP_LINE.fullmatch(line)]
        assert len(steps) == 4, clean.output
    shown = [line for line in clean.output.splitlines() if line]
    assert all(line.startswith(("[launcher] ", "[CPU0] ", "[CPU1] ")) for line in shown)
    summary = clean.report()["summary"]
    assert "what flows between blocks equal bit for bit in 4 of 4 steps" in summary
    assert clean.report()["scope"]["max_rate"] == 0.75
    assert "[launcher] not shown: GPUs, " in clean.output
    assert alive(clean.directory) == []


def test_its_directory_is_whole(clean: Run) -> None:
    assert faults(clean.report()) == []
    names = {path.name for path in clean.directory.iterdir()}
    wanted = {"config.json", "run.json", "report.json", "report.html", "launcher.log"}
    wanted |= {f"cpu{n}.{end}" for n in (0, 1) for end in ("log", "events.jsonl")}
    assert wanted <= names
    assert not any(name.endswith(".stacks.txt") for name in names)
    shown = [line.removeprefix("[CPU0] ") for line in clean.lines("[CPU0] ")]
    assert (clean.directory / "cpu0.log").read_text().splitlines() == shown
    for name in ("config.json", "run.json"):
        json.loads((clean.directory / name).read_text())
    assert os.readlink(clean.cwd / ".logs" / "latest") == str(clean.directory)


def test_it_finds_what_was_prepared_where_the_command_line_says_in_every_process(
    clean: Run,
) -> None:
    assert json.loads((clean.directory / "run.json").read_text())["data"]["hit"] is True
    assert not (clean.cwd / "other").exists()


def test_its_report_is_rebuilt_from_what_it_left_behind(clean: Run, launcher: Launcher) -> None:
    assert_rebuilt(clean, launcher)


def assert_rebuilt(run: Run, launcher: Launcher) -> None:
    before = run.report()
    (run.directory / "report.json").unlink()
    done = launcher.verb("report", str(run.directory))
    assert done.returncode == run.exit_code, done.stdout
    assert run.report()["workers"] == before["workers"]
    assert run.report()["summary"] == before["summary"]


def test_a_nan_names_worker_step_and_module_and_leaves_evidence(launcher: Launcher) -> None:
    run = launcher(
        "debug.drill=nan@2:CPU1:layers.0.attention.wq.weight",
        "debug.dump_tensors=true",
        "training.max_steps=2000",
    )
    assert run.exit_code == 20, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "FAIL"}
    about = next(w for w in run.report()["workers"] if w["name"] == "CPU1")
    born = "layers.0.attention.wq (backward: gradient of its weight)"
    counts = "1 NaN of 1,024 values, first at [0, 0], others "
    assert about["cause"].startswith(f"non-finite gradient at step 2, born in {born}: {counts}")
    assert about["cause"].endswith("; it did not come again")
    assert any("GRADIENT DETECTED [CPU 1]" in line for line in run.lines("[CPU1] "))
    dossier = run.directory / "dossier" / "cpu1"
    assert about["evidence"] == [str(dossier / name) for name in EVIDENCE_OF_STEP_2]
    assert all(Path(path).is_file() for path in about["evidence"])
    checkpoints = run.cwd / ".checkpoints" / "cpu1"
    assert (checkpoints / "nan_grad_step_2.pt").is_file()
    assert_dump_holds_one_bad_gradient(checkpoints / "debug" / "nan_debug_step_2.pkl")
    shutil.rmtree(checkpoints)  # the dossier has the evidence
    assert_rebuilt(run, launcher)


def assert_dump_holds_one_bad_gradient(path: Path) -> None:
    dump = pickle.loads(path.read_bytes())
    bad = [name for name, grad in dump["gradients"].items() if not np.isfinite(grad).all()]
    assert bad == ["layers.0.attention.wq.weight"]
    assert all(np.isfinite(value).all() for value in dump["parameters"].values())


def test_the_trainer_lives_without_the_launcher(launcher: Launcher, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "model_check", tree / "model_check", ignore=ignore)
    shutil.copytree(ROOT / "config", tree / "config")
    shutil.copy(ROOT / "pretrain_main.py", tree)
    env = launcher.env | {"PYTHONPATH": "", "GPU_RANK": "3"}
    command = [sys.executable, str(tree / "pretrain_main.py"), "--config", str(launcher.config)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[CPU0] Step [3/4]" in done.stdout


def test_the_plan_is_printed_without_the_trainer(launcher: Launcher, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("engine", "__pycache__")
    for package in ("launcher", "model_check", "config"):
        shutil.copytree(ROOT / package, tree / package, ignore=ignore)
    env = launcher.env | {"PYTHONPATH": str(tree)}
    command = launcher.arguments("--dry-run", "--json")
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [process["name"] for process in plan["processes"]] == ["prepare", "CPU0", "CPU1"]
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_was_named_by_hand_and_is_not_there_is_exit_69(launcher: Launcher) -> None:
    # No machine has it: a UUID of zeros.
    env = launcher.env | {"CUDA_VISIBLE_DEVICES": "GPU-00000000", "GPU_RANK": "3"}
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--debug"]
    done = subprocess.run(
        command, cwd=launcher.cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 69, done.stdout + done.stderr
    assert "names a GPU" in done.stdout + done.stderr
