"""`run.sh train TEXT`: a person's own text, one worker, checkpoints, and how to go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
TINY = (
    *("--device", "cpu", "training.max_steps=24", "training.batch_size=1"),
    *("training.context_length=32", "model.num_layers=1", "model.hidden_size=32"),
    *("model.num_heads=2", "model.num_kv_heads=2", "model.intermediate_size=64"),
)


def train(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", "train", *arguments, f"logging.log_dir={cwd}"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(3):
        words = " ".join(f"word{number}{i}" for i in range(300))
        (directory / f"{number}.txt").write_text(words)
    return directory


def test_own_text_is_trained_on_by_one_worker_which_saves(texts: Path) -> None:
    cwd = texts.parent
    first = train(cwd, "texts", *TINY)
    assert first.returncode == 0, first.stdout + first.stderr
    run = json.loads((cwd / ".logs" / "latest" / "run.json").read_text())
    assert (run["preset"], run["workers"], run["command"][:2]) == (
        *("train", ["CPU0"]),
        ["train", "texts"],
    )
    assert (cwd / ".checkpoints" / "cpu0" / "last.pt").exists()
    told = iter(first.stdout.splitlines())
    for wait in (
        "data: training tokenizer bpe",
        "data: prepared",
        "starting the training",
        "Step [",
    ):
        assert any(wait in line for line in told), f"{wait!r} is not told, or not in this order"


def test_more_workers_can_be_asked_for(texts: Path) -> None:
    plan = train(texts.parent, "texts", "--workers", "3", "--device", "cpu", "--dry-run", "--json")
    assert plan.returncode == 0, plan.stderr
    names = [process["name"] for process in json.loads(plan.stdout)["processes"]]
    assert names == ["prepare", "CPU0", "CPU1", "CPU2"]


def test_a_command_is_not_trained_with(texts: Path) -> None:
    refused = train(texts.parent, "texts", "--", "true")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "`-- COMMAND` is for a run of your own command" in refused.stderr


@pytest.mark.parametrize("arguments", [(), ("--device", "cpu"), ("training.max_steps=3",)])
def test_the_text_comes_first(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    refused = train(tmp_path, *arguments)
    assert refused.returncode == 2
    assert refused.stderr == (
        "[launcher] error: train: give the text first: run.sh train texts/ [OPTIONS]\n"
    )
