"""Two stages through the launcher: text first, then prompt and target from its weights."""

import json
import random
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Launcher, Run

STAGE_TWO = (
    "training.stage=prompt_target",
    "data.packing=true",
    "data.num_samples=null",
    "data.dataset=rows.jsonl",
    "data.validation=even=kind:even,held=0.1",
    "training.eval_interval=2",
)


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


def validation(run: Run, name: str) -> list[list[dict[str, Any]]]:
    report = json.loads((run.cwd / name / "report.json").read_text())
    return [worker["validation"] for worker in report["workers"]]


def test_a_second_stage_begins_with_the_first_and_is_checked_like_it(launcher: Launcher) -> None:
    first = launcher("training.save_last=true", "--workers=1")
    assert first.exit_code == 0, first.output
    write_rows(launcher.cwd)
    weights = "model.init_from=.checkpoints/cpu0/last.pt"
    given = (*STAGE_TWO, weights, "training.save_last=true", "system.checkpoint_dir=tuned")
    second = launcher(*given, "--workers=2", "--run-dir=run2")
    assert second.exit_code == 0, second.output
    assert "PASS" in second.output
    assert "with tokenizer last.pt" in second.output
    both = validation(second, "run2")
    measured = ("split", "step", "loss", "token_accuracy", "exact_match")
    one, other = ([[split[key] for key in measured] for split in worker] for worker in both)
    assert one == other
    assert [split["split"] for split in both[0]] == ["even", "held"]
    assert all(0 <= split["token_accuracy"] <= 1 for split in both[0])
    assert second.lines("[CPU1] Eval [2] even | Loss: ")
    page = (launcher.cwd / "run2" / "report.html").read_text()
    assert "exact match" in page
    told = launcher.verb("generate", "tuned/cpu0", "--prompt=count 7", "--max-tokens=4")
    assert told.returncode == 0, told.stdout


def test_ranks_measure_what_one_worker_measures(launcher: Launcher) -> None:
    """The same examples in each step, whoever computes them."""
    write_rows(launcher.cwd)
    given = (*STAGE_TWO, "data.tokenizer=bpe", "training.precision=fp32")
    one = launcher(*given, "--workers=1", "training.grad_accum_nums=2")
    job = launcher(*given, "--mode=ddp", "--workers=2", "--run-dir=run2")
    assert (one.exit_code, job.exit_code) == (0, 0), one.output + job.output
    (alone,), (first, *_) = validation(one, "run"), validation(job, "run2")
    for ours, theirs in zip(first, alone, strict=True):
        assert ours["exact_match"] == theirs["exact_match"]
        assert abs(ours["loss"] - theirs["loss"]) < 1e-4
        assert abs(ours["token_accuracy"] - theirs["token_accuracy"]) < 0.02
