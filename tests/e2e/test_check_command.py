"""`run.sh check -- COMMAND`, with a scripted command that tells what it trains. What the rest of
the launcher makes of such events is in tests/launcher/verdict/test_own_command.py."""

import json
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from tests.e2e.conftest import TINY, Launcher, Run
from tests.launcher.report.report_schema import faults

COMMAND = Path(__file__).parents[1] / "scripted" / "command.py"
NOT_AGAIN = "not computed again: a command of your own cannot be replayed yet"


def checked(
    launcher: Launcher, *cases: str, workers: int = 3, options: tuple[str, ...] = ()
) -> Run:
    asked = ("launch.replay_s=200", f"--workers={workers}", *options)
    return check(launcher, *asked, "--", sys.executable, str(COMMAND), *cases)


def check(launcher: Launcher, *asked: str) -> Run:
    _, _, _, *arguments = launcher.arguments(*asked)
    done = launcher.verb("check", *arguments)
    return Run(done.returncode, done.stdout, launcher.cwd / "run", launcher.cwd)


def told_again(run: Run) -> None:
    """The report that is made again says the same."""
    before = run.report()
    assert faults(before) == []
    assert main(["report", str(run.directory)]) == run.exit_code
    assert run.report() == before


def test_a_command_that_trains_alike_passes_and_says_what_was_equal(checks: Launcher) -> None:
    run = checked(checks, options=("--seed=3", "--max-steps=4"))
    assert run.exit_code == 0, run.output
    assert run.report()["summary"] == (
        "3 CPU workers trained 4 steps, 256 tokens each; loss, gradients, weights and the "
        "optimizer's state equal bit for bit in 4 of 4 steps; random numbers seeded by --seed 3"
    )
    assert "random numbers seeded by --seed 3" in (run.directory / "report.html").read_text()
    assert run.report()["run"]["checked"] == {"seed": 3}
    assert "check --device" not in run.output
    told_again(run)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("gradient@3:CPU1", "the gradient of blocks.0.weight (bit 9 of value 7)"),
        ("momentum@2:CPU1", "the momentum_buffer of blocks.0.weight (bit 9 of value 7)"),
    ],
)
def test_the_worker_that_differs_is_named_and_not_computed_again(
    checks: Launcher, case: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = checked(checks, case)
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert f"CPU1 differs in {what}" in run.report()["summary"]
    assert run.report()["summary"].endswith(f"; {NOT_AGAIN}")
    assert "Run the same again, with three workers" in run.report()["do_now"]
    assert "replay RUN_DIR" not in run.output
    told_again(run)
    assert main(["replay", str(run.directory)]) == 2
    refused = "replay: a command of your own ran there, which cannot be replayed yet"
    assert refused in capfd.readouterr().err


def test_of_two_that_differ_nobody_is_named(checks: Launcher) -> None:
    run = checked(checks, "gradient@3:CPU1", workers=2)
    assert (run.exit_code, run.report()["culprits"]) == (23, []), run.output
    assert run.report()["summary"].endswith(f"; {NOT_AGAIN}")


@pytest.mark.parametrize(
    ("cases", "options", "exit_code", "what"),
    [
        (["weights"], [], 2, "the first weights and random numbers (torch) differ between workers: "
         "give --seed N, or seed random numbers before the model is made"),
        (["weights"], ["--seed=1"], 0, "random numbers seeded by --seed 1"),
        (["batch"], [], 2, "the batch and random numbers (torch) differ"),
        (["order"], ["--seed=1"], 2, "the batch differs between workers: torch, Python and numpy"),
        (["reseed"], ["--seed=1"], 2, "it seeds them again after --seed 1 did"),
    ],
)  # fmt: skip
def test_a_command_that_is_not_repeatable_says_what_to_set(
    checks: Launcher, cases: list[str], options: list[str], exit_code: int, what: str
) -> None:
    run = checked(checks, *cases, workers=2, options=tuple(options))
    assert (run.exit_code, run.report()["culprits"]) == (exit_code, []), run.output
    assert what in run.report()["summary"]
    told_again(run)


def test_an_operation_that_varies_is_told_with_what_makes_it_repeat(checks: Launcher) -> None:
    run = checked(checks, "varies:CPU0")
    assert (run.exit_code, run.report()["culprits"]) == (2, []), run.output
    assert "CPU0: the passes of its first step gave other bits" in run.report()["summary"]
    assert "torch.use_deterministic_algorithms(True)" in run.report()["do_now"]
    told_again(run)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("silent", "3 CPU workers showed no step of a torch optimizer"),
        ("breaks@2:CPU1", "CPU1 was watched for 3 steps only: the hooks of torch failed"),
        ("short:CPU2", "CPU2 was watched for 7 steps only: its equals did 8"),
    ],
)
def test_what_was_not_seen_does_not_pass(checks: Launcher, case: str, what: str) -> None:
    run = checked(checks, case)
    assert run.exit_code == 75, run.output
    assert what in run.report()["summary"]
    told_again(run)


def test_a_command_that_fails_is_told_as_ever(checks: Launcher) -> None:
    run = check(checks, "--workers=2", "--", sys.executable, "-S", "-c", "raise ValueError(3)")
    assert run.exit_code == 1
    assert "every worker ended with exit code 1: ValueError: 3" in run.report()["summary"]


def test_rounds_of_a_command_are_compared(checks: Launcher) -> None:
    run = checked(checks, workers=2, options=("--repeat=2",))
    assert run.exit_code == 0, run.output
    assert run.report()["summary"].startswith("2 rounds passed, each with the same bits")


def test_a_plain_command_names_the_check_and_is_not_watched(checks: Launcher) -> None:
    command = (sys.executable, str(COMMAND), "steps=3")
    run = checks("--workers=1", "--", *command)
    assert run.exit_code == 0, run.output
    assert not (run.directory / "cpu0.events.jsonl").read_bytes()
    (line,) = run.lines("[launcher] a training with torch can be compared bit for bit: ")
    assert f"check --device cpu -- {' '.join(command)}" in line
    assert "exit code 0" in run.output.splitlines()[-1]
    record = json.loads((run.directory / "run.json").read_text())
    assert "checked" not in record


@pytest.fixture
def checks(scripted: Launcher) -> Launcher:
    """With the real plan, and commands that end by themselves."""
    scripted.module = "launcher"
    scripted.config.write_text(json.dumps({n: s for n, s in TINY.items() if n != "training"}))
    return scripted
