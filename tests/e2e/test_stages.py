"""A training, what its model says in between and afterwards, and a second stage."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_check.generate.__main__ import main as generate
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher, Run, launcher_in
from tests.e2e.test_in_step import events

SAMPLES = ("training.sample_interval=2", "training.sample_length=4")
STAGE_TWO = (
    "training.stage=prompt_target",
    "data.packing=true",
    "data.num_samples=null",
    "data.dataset=rows.jsonl",
    "data.validation=even=kind:even,held=0.1",
    "training.eval_interval=2",
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    """A first stage of one worker, which samples."""
    launcher = launcher_in(tmp_path_factory.mktemp("first"), token_cache)
    (launcher.cwd / "prompts.txt").write_text("def main\n\nimport\n")
    asked = (*SAMPLES, "training.sample_prompts=prompts.txt", "training.save_last=true")
    run = launcher(*asked, "--workers=1")
    assert run.exit_code == 0, run.output
    return run


def test_a_worker_says_what_its_model_says(first: Run) -> None:
    told = events(first.directory / "cpu0.events.jsonl")
    said = [(event["step"], event["prompt"]) for event in told if event["kind"] == "sample"]
    assert said == [(step, prompt) for step in (2, 4) for prompt in ("def main", "import")]
    assert len(first.lines('[CPU0] Sample | step 2 | "def main" -> "')) == 1


def test_prompts_that_cannot_be_read_are_refused_before_anything_starts(launcher: Launcher) -> None:
    run = launcher("training.sample_interval=2", "training.sample_prompts=nowhere.txt")
    assert run.exit_code == 2
    assert "sample_prompts = nowhere.txt: cannot be read: No such file" in run.output


def test_a_trained_model_says_something_and_a_reader_may_leave(
    first: Run, launcher: Launcher
) -> None:
    model = str(first.cwd / ".checkpoints" / "cpu0")
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", "generate", model, "--prompt=def ", "--max-tokens=8"],
        cwd=launcher.cwd,
        env=launcher.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(DEADLINE_S) == -13


def test_a_second_stage_begins_with_the_first_and_is_checked_like_it(
    first: Run, launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first.cwd / ".checkpoints", launcher.cwd / ".checkpoints")
    write_rows(launcher.cwd)
    weights = "model.init_from=.checkpoints/cpu0/last.pt"
    given = (*STAGE_TWO, weights, "training.save_last=true", "system.checkpoint_dir=tuned")
    second = launcher(*given, "--workers=1")
    assert second.exit_code == 0, second.output
    assert "PASS" in second.output
    assert "with tokenizer last.pt" in second.output
    (measured,) = validation(second)
    assert [split["split"] for split in measured] == ["even", "held"]
    assert all(0 <= split["token_accuracy"] <= 1 for split in measured)
    assert all(split["tokens_per_s"] > 0 for split in measured)
    assert second.lines("[CPU0] Eval [2] even | Loss: ")
    assert second.lines("[launcher] CPU0: validation after 4 steps: even ")
    assert "exact match" in (second.directory / "report.html").read_text()
    tuned = str(launcher.cwd / "tuned" / "cpu0")
    assert generate([tuned, "--prompt=count 7", "--max-tokens=4"]) == 0
    assert "4 tokens, max tokens; " in capfd.readouterr().err


@pytest.mark.slow  # in tests/engine: test_shards.py evaluates ranks, test_sampling.py samples
def test_ranks_measure_and_say_what_one_worker_does(launcher: Launcher) -> None:
    """The same examples in each step, whoever computes them; the first rank speaks for all."""
    write_rows(launcher.cwd)
    given = (*STAGE_TWO, *SAMPLES, "data.tokenizer=bpe", "training.precision=fp32")
    one = launcher(*given, "--workers=1", "training.grad_accum_nums=2")
    (alone,) = validation(one)
    one.directory.rename(launcher.cwd / "one")
    job = launcher(*given, "--mode=ddp", "--workers=2")
    assert (one.exit_code, job.exit_code) == (0, 0), one.output + job.output
    for ours, theirs in zip(validation(job)[0], alone, strict=True):
        assert ours["exact_match"] == theirs["exact_match"]
        assert abs(ours["loss"] - theirs["loss"]) < 1e-4
        assert abs(ours["token_accuracy"] - theirs["token_accuracy"]) < 0.02
    assert job.lines("[CPU0] Sample | step 4 | ")
    assert not job.lines("[CPU1]")
    other = events(job.directory / "cpu1.events.jsonl")
    assert not [event for event in other if event["kind"] == "sample"]


def write_rows(directory: Path) -> None:
    draw = random.Random(2)
    rows = [
        {
            "prompt": f"count {draw.randrange(1000)}",
            "completion": " one" * (number % 5),
            "kind": ("even", "odd")[number % 2],
        }
        for number in range(120)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def validation(run: Run) -> list[list[dict[str, Any]]]:
    return [worker["validation"] for worker in run.report()["workers"]]
