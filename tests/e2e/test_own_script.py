"""`check -- COMMAND`: a person's own training script, watched by hooks of torch's optimizers."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher, Run
from tests.e2e.test_check_command import check
from tests.e2e.test_replay import REPLAYS

SCRIPT = Path(__file__).parents[1] / "instrument" / "nano.py"
BROKEN = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    if step == 2 and (ours := sys.modules.get("model_check.instrument.update")):
        ours.WatchedUpdate.take = None
    optimizer.step()
print("to the end")
"""


def command(script: Path = SCRIPT, on_cpu1: str = "", **env: str) -> list[str]:
    """`on_cpu1`: a variable more, in that worker."""
    one = f'if [ "$MODEL_CHECK_WORKER" = CPU1 ]; then export {on_cpu1}; fi; ' if on_cpu1 else ""
    given = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    text = f"{given}{one}exec {shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    return ["--", "bash", "-c", text]


def checked(
    launcher: Launcher, *options: str, workers: int = 3, script: Path = SCRIPT, **env: str
) -> Run:
    return check(launcher, f"--workers={workers}", *options, *command(script, **env))


def test_equal_workers_pass_and_train_what_they_train_alone(launcher: Launcher) -> None:
    watched = checked(launcher, "--max-steps=9", workers=2)  # it ends by itself, after 6
    assert watched.exit_code == 0, watched.output
    assert "equal bit for bit in 6 of 6 steps" in watched.output
    alone = launcher("--workers=2", "--run-dir=alone", *command())
    ends = [
        {line.partition("END ")[2] for line in run.output.splitlines() if "END " in line}
        for run in (watched, alone)
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1


@pytest.mark.parametrize(
    ("workers", "flip", "said"),
    [
        (2, "weight:h.1.fc.weight:77", "CPU1: h.1.fc.weight changed (bit 9 of value 77)"),
        (
            3,
            "gradient:h.1.fc.weight:77",
            "step 3: CPU1 differs in the gradient of h.1.fc.weight (bit 9 of value 77)",
        ),
    ],
)
def test_a_flipped_bit_is_named(launcher: Launcher, workers: int, flip: str, said: str) -> None:
    run = checked(launcher, workers=workers, on_cpu1=f"NANO_FLIP={flip}")
    assert run.exit_code == 21, run.output
    assert said in run.output.splitlines()[-1]


def test_a_script_is_computed_again_up_to_its_fault(launcher: Launcher) -> None:
    """Alone, which takes the fewest processes. A file tells the run from its replays."""
    once = "if [ ! -e flipped ]; then touch flipped; export NANO_FLIP=weight:h.1.fc.weight:77; fi"
    argv = ["--", "bash", "-c", f"{once}; exec {sys.executable} {SCRIPT}"]
    run = check(launcher, "--workers=1", "launch.replay_s=200", *argv)
    assert run.exit_code == 21, run.output
    assert "CPU0: h.1.fc.weight changed (bit 9 of value 77)" in run.output.splitlines()[-1]
    said = "; replayed 3 times (steps 0 to 3): CPU0 stayed as it was"
    assert run.report()["summary"].endswith(said)
    printed = [line.split()[2] for line in run.lines("[CPU0 replay] ")]
    assert [word for word in printed if word.isdigit()] == [*"012"] * 3  # it ends in its step 3


def test_a_script_without_a_seed_is_told_what_to_give(launcher: Launcher) -> None:
    run = checked(launcher, NANO_SEED="", workers=2)
    assert run.exit_code == 2, run.output
    assert "the first weights, the batch and random numbers (torch) differ" in run.output


def test_a_script_without_a_seed_repeats_with_one(launcher: Launcher) -> None:
    seeded = checked(launcher, "--seed=3", "--max-steps=3", NANO_SEED="", workers=2)
    assert seeded.exit_code == 0, seeded.output
    assert "equal bit for bit in 3 of 3 steps; random numbers seeded by --seed 3" in seeded.output


def test_an_operation_that_varies_names_nobody(launcher: Launcher) -> None:
    run = checked(launcher, REPLAYS, NANO_VARIES="forward")
    assert run.exit_code == 2, run.output
    assert "an operation of the command varies" in run.output.splitlines()[-1]
    assert "SUSPECT" not in run.output


def test_the_module_that_made_a_nan_is_named(launcher: Launcher) -> None:
    run = checked(launcher, workers=2, on_cpu1="NANO_NAN=forward")
    assert run.exit_code == 20, run.output
    assert "CPU1 failed first: non-finite gradient at step 3, born in h.1.fc" in run.output


def test_one_worker_is_held_against_the_golden_file_of_three(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text())

    def run(*options: str, python: str = sys.executable) -> Run:
        return check(launcher, "--max-steps=9", *options, "--", python, str(script))

    agreed = run("--workers=3")
    assert agreed.exit_code == 0, agreed.output
    written = launcher.verb("report", "run", "--write-golden", "g.json")
    assert written.returncode == 0, written.stdout
    held = ("--workers=1", "--golden=g.json", "--run-dir")
    link = tmp_path / "python3"
    link.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    link.chmod(0o755)
    equal = run(*held, "equal", python=str(link))
    assert equal.exit_code == 0, equal.output
    assert "equal bit for bit in 6 of 6 steps of golden g.json" in equal.output
    launcher.environ["NANO_FLIP"] = "gradient:h.1.fc.weight:77"
    flipped = run(*held, "flipped")
    assert flipped.exit_code == 21, flipped.output
    assert "SUSPECT: CPU0 differs from golden g.json at step 3, gradients" in flipped.output
    script.write_text(SCRIPT.read_text().replace("Dropout(0.1)", "Dropout(0.2)"))
    other = run(*held, "other")
    assert other.exit_code == 75, other.output
    assert "could not be compared with golden g.json: source train.py" in other.output


def test_what_was_not_watched_to_its_end_is_not_passed(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    run = checked(launcher, "--seed=1", script=script, workers=2)
    assert run.exit_code == 75, run.output
    assert run.output.count("to the end") == 2
    assert "not watched from step 2 on: TypeError" in run.output
