"""`run.sh check -- COMMAND`, with a scripted command that tells what it trains. What the rest of
the launcher makes of such events is in tests/launcher/verdict/test_own_command.py."""

import json
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from tests.e2e.conftest import TINY, Launcher, Run
from tests.e2e.test_replay import REPLAYS
from tests.launcher.report.report_schema import faults

COMMAND = Path(__file__).parents[1] / "scripted" / "command.py"
WRITES = "[launcher] replay: the command writes its files again, "


def checked(
    launcher: Launcher, *cases: str, workers: int = 3, options: tuple[str, ...] = ()
) -> Run:
    return check(launcher, f"--workers={workers}", *options, *command(*cases))


def command(*cases: str) -> tuple[str, ...]:
    return ("--", sys.executable, str(COMMAND), *cases)


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
    assert run.report()["run"]["checked"] == {"seed": 3, "deterministic": False, "max_steps": 4}
    assert "check --device" not in run.output
    told_again(run)


GRADIENT = "the gradient of blocks.0.weight (bit 9 of value 7)"
MOMENTUM = "the momentum_buffer of blocks.0.weight (bit 9 of value 7)"


@pytest.mark.parametrize(
    ("cases", "what", "verdict", "said"),
    [
        (["gradient@3:CPU1", "once"], GRADIENT, "SUSPECT",
         "replayed 3 times (steps 0 to 3): CPU1 gave the right bits"),
        (["momentum@2:CPU1"], MOMENTUM, "FAIL", "replayed 4 times (steps 0 to 2): CPU1 was wrong "
         f"again in 4 of 4 replays, first in {MOMENTUM}; CPU0 and CPU2 never were"),
    ],
)  # fmt: skip
def test_the_worker_that_differs_is_named_and_computed_again(
    checks: Launcher, cases: list[str], what: str, verdict: str, said: str
) -> None:
    run = checked(checks, *cases, "writes", options=(REPLAYS,))
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert run.verdicts()["CPU1"] == verdict
    assert f"CPU1 differs in {what}" in run.report()["summary"]
    assert run.report()["summary"].endswith(f"; {said}")
    assert len(run.lines(WRITES)) == 1
    num_times = len(list(run.directory.glob("cpu1.replay*.log")))
    assert (checks.cwd / "out-CPU1").read_text() == "a training\n" * (1 + num_times)
    told_again(run)


def test_a_command_whose_healthy_worker_gives_other_bits_names_nobody(checks: Launcher) -> None:
    run = checked(checks, "gradient@3:CPU1", "strays:CPU2", options=(REPLAYS,))
    assert (run.exit_code, run.report()["culprits"]) == (2, []), run.output
    assert {row["kind"] for row in run.report()["workers"]} == {"command_varies"}
    assert "CPU2: step 1, gradients): an operation of the command varies" in run.report()["summary"]
    assert run.report()["do_now"].startswith("Run the same again with --deterministic")
    told_again(run)


def test_of_two_that_differ_the_replay_tells_whose_bits_came_again(checks: Launcher) -> None:
    run = checked(checks, "gradient@3:CPU1", "once", options=(REPLAYS,), workers=2)
    assert (run.exit_code, run.report()["culprits"]) == (23, []), run.output
    said = "; replayed: CPU0 gave its bits again, and CPU1 gave those of CPU0"
    assert run.report()["summary"].endswith(said)


def test_a_command_is_computed_again_as_the_record_of_its_run_tells(
    checks: Launcher, tmp_path: Path
) -> None:
    """Also from another directory: it starts where it started. Of its own seed and steps."""
    options = ("--seed=3", "--deterministic")
    run = checked(checks, "weights", "momentum@2:CPU1", "writes", options=options)
    assert run.exit_code == 21, run.output
    assert "not replayed" not in run.report()["summary"]
    assert "replay" in run.report()["do_now"]
    checks.cwd = tmp_path / "elsewhere"
    checks.cwd.mkdir()
    again = checks.verb("replay", str(run.directory), REPLAYS)
    assert again.returncode == 21, again.stdout
    assert run.verdicts()["CPU1"] == "FAIL"
    assert "CPU1 was wrong again in 4 of 4 replays" in run.report()["summary"]
    summary = "; random numbers seeded by --seed 3; deterministic operations by --deterministic"
    assert run.report()["summary"].endswith(summary)
    assert (tmp_path / "out-CPU0").read_text() == "a training\n" * 5
    told_again(run)


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ((), "replay: a command of your own ran there, and nothing of it was compared"),
        (("check",), "replay: its command line had a secret (***), which no file keeps"),
    ],
)
def test_a_command_that_cannot_be_computed_again_says_why(
    checks: Launcher,
    asked: tuple[str, ...],
    refused: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["steps=2", "--api-key", "sesame-sesame"]
    _, _, _, *options = checks.arguments("--workers=2", *command(*words))
    done = checks.verb(*asked, *options)
    assert done.returncode == 0, done.stdout
    assert main(["replay", str(checks.cwd / "run"), "CPU1"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert refused in line


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
    assert run.report()["do_now"].startswith("Run the same again with --deterministic")
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
    run = checks("--workers=1", *command("steps=3"))
    assert run.exit_code == 0, run.output
    assert not (run.directory / "cpu0.events.jsonl").read_bytes()
    (line,) = run.lines("[launcher] a training with torch can be compared bit for bit: ")
    assert f"check --device cpu {' '.join(command('steps=3'))}" in line
    assert "exit code 0" in run.output.splitlines()[-1]
    record = json.loads((run.directory / "run.json").read_text())
    assert "checked" not in record


@pytest.fixture
def checks(scripted: Launcher) -> Launcher:
    """With the real plan, and commands that end by themselves."""
    scripted.module = "launcher"
    scripted.config.write_text(json.dumps({n: s for n, s in TINY.items() if n != "training"}))
    return scripted
