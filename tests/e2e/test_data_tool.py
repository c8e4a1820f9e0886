"""Texts -> the data preparation tool -> training, in real processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher

WORDS = "the model checks every GPU of a box and says which one cannot train "


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    directory = tmp_path / "raw text"
    directory.mkdir()
    for number in range(10):
        (directory / f"{number}.txt").write_text(f"text {number}: {WORDS * 30}")
    return directory


def command(script: str, launcher: Launcher, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        cwd=launcher.cwd,
        env=launcher.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def processed(launcher: Launcher, raw: Path) -> Path:
    """As the guide of the tool makes it."""
    output = launcher.cwd / "processed"
    command(
        "prepare_dataset.py",
        launcher,
        *("--input_dir", raw, "--output_dir", output, "--tokenizer_type", "bpe"),
        *("--vocab_size", 512, "--max_length", 24, "--stride", 4, "--num_workers", 2),
        "data.validation=held=0.2",
    )
    return output


TWO_STEPS = ("training.max_steps=2", "training.context_length=24")


def test_a_prepared_directory_is_trained_on_by_every_worker(
    launcher: Launcher, processed: Path
) -> None:
    arguments = ("--preprocessed-data", str(processed), "--offline-mode", *TWO_STEPS)
    dry = launcher(*arguments, "model.vocab_size=null", "--dry-run")
    (size,) = re.findall(r"model: ([0-9,]+ parameters) with a vocabulary", dry.output)
    run = launcher(*arguments, "model.vocab_size=null")
    assert run.exit_code == 0, run.output
    for worker in ("CPU0", "CPU1"):
        assert any(size in line for line in run.lines(f"[{worker}]"))
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    assert any("data: found raw text" in line for line in run.lines("[launcher]"))
    assert "held" in run.output


def test_a_worker_by_hand_takes_the_data_directory(launcher: Launcher, processed: Path) -> None:
    said = command(
        "pretrain_main.py",
        launcher,
        *("--config", launcher.config, "--data_dir", processed, *TWO_STEPS),
    )
    assert "Step [1/2]" in said


def test_raw_text_is_prepared_and_trained_on_in_one_command(launcher: Launcher, raw: Path) -> None:
    arguments = ("--raw-data", str(raw), "--offline-mode", "data.tokenizer=bpe", "--max-steps", "2")
    run = launcher(*arguments)
    assert run.exit_code == 0, run.output
    made = launcher.cwd / "preprocessed_data"
    assert {path.name for path in made.iterdir()} == {"tokenizer.json", "dataset", "metadata.json"}


def test_a_length_that_was_not_prepared_ends_the_run_before_it_starts(
    launcher: Launcher, processed: Path
) -> None:
    run = launcher("--preprocessed-data", str(processed))
    assert run.exit_code == 2
    (line,) = run.lines("[launcher] error")
    assert "training.context_length = 32" in line
    assert "was prepared with 24" in line
