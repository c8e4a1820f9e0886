"""Texts -> the data preparation tool -> training, in real processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher

WORDS = "the model checks every GPU of a box and says which one cannot train "


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts") / "raw text"
    directory.mkdir()
    for number in range(10):
        (directory / f"{number}.txt").write_text(f"text {number}: {WORDS * 30}")
    return directory


@pytest.fixture(scope="module")
def processed(raw: Path) -> Path:
    """As the guide of the tool makes it."""
    output = raw.parent / "processed"
    command = (sys.executable, ROOT / "prepare_dataset.py", "data.validation=held=0.2")
    command += ("--input_dir", raw, "--output_dir", output, "--tokenizer_type", "bpe")
    command += ("--vocab_size", "512", "--max_length", "24", "--stride", "4", "--num_workers", "2")
    done = subprocess.run(
        command,
        cwd=raw.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    return output


TWO_STEPS = ("training.max_steps=2", "training.context_length=24")


def test_a_prepared_directory_is_trained_on(launcher: Launcher, processed: Path) -> None:
    arguments = ("--preprocessed-data", str(processed), "--offline-mode", *TWO_STEPS)
    dry = launcher(*arguments, "model.vocab_size=null", "--dry-run")
    (size,) = re.findall(r"model: ([0-9,]+ parameters) with a vocabulary", dry.output)
    run = launcher(*arguments, "model.vocab_size=null", "--workers=1")
    assert run.exit_code == 0, run.output
    assert any(size in line for line in run.lines("[CPU0]"))
    assert any("data: found raw text" in line for line in run.lines("[launcher]"))
    assert "held" in run.output


def test_raw_text_is_prepared_and_trained_on_in_one_command(launcher: Launcher, raw: Path) -> None:
    arguments = ("--raw-data", str(raw), "--offline-mode", "data.tokenizer=bpe", "--max-steps", "1")
    run = launcher(*arguments, "--workers=1")
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
