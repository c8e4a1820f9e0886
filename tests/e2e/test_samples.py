"""training.sample_interval, in workers of the launcher."""

from tests.e2e.conftest import Launcher
from tests.e2e.test_in_step import events

EVERY = ("training.sample_interval=2", "training.max_steps=3", "training.sample_length=4")


def test_each_worker_says_what_its_model_says_and_trains_as_without(launcher: Launcher) -> None:
    (launcher.cwd / "prompts.txt").write_text("def main\n\nimport\n")
    run = launcher(*EVERY, "training.sample_prompts=prompts.txt")
    assert run.exit_code == 0, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    told = [events(run.directory / f"cpu{n}.events.jsonl") for n in (0, 1)]
    said = [[(e["step"], e["prompt"], e["text"]) for e in t if e["kind"] == "sample"] for t in told]
    assert said[0] == said[1]
    assert [s[:2] for s in said[0]] == [(n, p) for n in (2, 3) for p in ("def main", "import")]
    assert len(run.lines('[CPU1] Sample | step 2 | "def main" -> "')) == 1
    plain = launcher("training.max_steps=3", "--run-dir", str(launcher.cwd / "plain"))
    assert plain.exit_code == 0, plain.output
    told.append(events(launcher.cwd / "plain" / "cpu0.events.jsonl"))
    losses = [[e["loss"] for e in t if e["kind"] == "step"] for t in told]
    assert losses[0] == losses[1] == losses[2]


def test_the_first_rank_of_a_job_speaks_for_all(launcher: Launcher) -> None:
    run = launcher("--mode", "ddp", *EVERY)
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    assert run.lines("[CPU0] Sample | step 3 | ")
    assert not run.lines("[CPU1]")
    other = events(run.directory / "cpu1.events.jsonl")
    assert not [event for event in other if event["kind"] == "sample"]


def test_prompts_that_cannot_be_read_are_refused_before_anything_starts(launcher: Launcher) -> None:
    run = launcher("training.sample_interval=2", "training.sample_prompts=nowhere.txt")
    assert run.exit_code == 2
    assert "sample_prompts = nowhere.txt: cannot be read: No such file" in run.output
