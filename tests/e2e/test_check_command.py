"""`run.sh check -- COMMAND`, with a scripted command that tells what it trains. What the rest of
the launcher makes of such events is in tests/launcher/verdict/test_own_command.py."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from launcher.cli import main
from tests.e2e.conftest import TINY, Launcher, Run
from tests.e2e.test_replay import REPLAYS
from tests.launcher.report.report_schema import faults
from tests.launcher.verdict.test_golden import golden as golden_of_training

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
    given = run.report()["run"]["checked"]
    assert (given["seed"], given["deterministic"], given["max_steps"]) == (3, False, 4)
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
    run = checked(checks, "gradient@3:CPU1", "once", "varies:CPU2", options=(REPLAYS,))
    assert (run.exit_code, run.report()["culprits"]) == (2, []), run.output
    assert run.report()["summary"].startswith(
        "computed again, CPU0 and CPU2 differ (their models, called several times behind step 3)"
    )
    assert run.report()["do_now"].startswith("Run the same again with --deterministic")
    told_again(run)


def test_calls_of_a_suspect_tell_nothing(checks: Launcher) -> None:
    run = checked(checks, "gradient@3:CPU1", "once", "varies:CPU1", options=(REPLAYS,))
    assert (run.exit_code, run.report()["culprits"]) == (21, ["CPU1"]), run.output
    assert run.report()["summary"].endswith("CPU1 gave the right bits")
    told_again(run)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("silent", "3 CPU workers showed no step of a torch optimizer"),
        ("breaks@2:CPU1", "CPU1 was watched for 3 steps only: not watched from step 3 on: Ru"),
        ("short:CPU2", "CPU2 was watched for 7 steps only: its equals did 8"),
    ],
)
def test_what_was_not_seen_does_not_pass(checks: Launcher, case: str, what: str) -> None:
    run = checked(checks, case)
    assert run.exit_code == 75, run.output
    assert what in run.report()["summary"]
    assert "let it call `watch` of model_check" in run.report()["do_now"]
    told_again(run)


def test_a_pass_says_that_one_of_several_processes_was_compared(checks: Launcher) -> None:
    run = checked(checks, "beside", workers=2)
    assert run.exit_code == 0, run.output
    said = "; one of the 2 processes of a worker that train was compared"
    assert run.report()["summary"].endswith(said)
    assert run.lines("[launcher] note: all 2 CPU workers: another process trains, too")
    told_again(run)


def test_the_exit_code_of_the_process_counts_whatever_its_hooks_told(checks: Launcher) -> None:
    run = checked(checks, "exits=3", workers=1)
    assert (run.exit_code, run.verdicts()) == (3, {"CPU0": "FAIL"}), run.output
    assert "CPU0 failed: exit code 3 after step 7" in run.report()["summary"]


@pytest.fixture
def golden(checks: Launcher) -> Launcher:
    """With g.json, of three workers that agreed."""
    assert checked(checks, options=("--seed=1",)).exit_code == 0
    written = checks.verb("report", "run", "--write-golden", "g.json")
    assert written.returncode == 0, written.stdout
    assert "golden file g.json: 8 steps of CPU0, CPU1 and CPU2" in written.stdout
    return checks


def against_golden(golden: Launcher, *cases: str, seed: int = 1, **environ: str) -> Run:
    """One worker alone, in a directory of its own."""
    golden.environ |= environ
    options = (f"--seed={seed}", "--golden=g.json", "--run-dir=again")
    run = checked(golden, *cases, workers=1, options=options)
    return replace(run, directory=golden.cwd / "again")


def test_a_worker_alone_is_compared_with_a_golden_file_of_its_command(golden: Launcher) -> None:
    run = against_golden(golden)
    assert run.exit_code == 0, run.output
    said = (
        "loss, gradients, weights and the optimizer's state equal bit for bit in 8 of 8 steps of "
        "golden g.json"
    )
    assert said in run.report()["summary"]
    told_again(run)


def test_a_flipped_bit_is_a_suspect_of_the_golden_file(golden: Launcher) -> None:
    run = against_golden(golden, SCRIPTED_CASES="gradient@3:CPU0")
    assert (run.exit_code, run.report()["culprits"]) == (21, ["CPU0"]), run.output
    assert "CPU0 differs from golden g.json at step 3, gradients" in run.report()["summary"]
    assert "bash run.sh replay" in run.report()["do_now"]
    told_again(run)


@pytest.mark.parametrize(
    ("cases", "seed", "environ", "what"),
    [
        (["steps=4"], 1, "", "word 3 of the command n/a there, steps=4 here"),
        ([], 2, "", "seed 1 there, 2 here"),
        ([], 1, "source=89ab", "source command.py 4567 there, 89ab here"),
        ([], 1, "order", "other than in the file from step 0 on: the batch"),
    ],
)
def test_what_computes_something_else_is_not_comparable_and_nobody_is_named(
    golden: Launcher, cases: list[str], seed: int, environ: str, what: str
) -> None:
    run = against_golden(golden, *cases, seed=seed, SCRIPTED_CASES=environ)
    assert (run.exit_code, run.report()["culprits"]) == (75, []), run.output
    assert f"could not be compared with golden g.json: {what}" in run.report()["summary"]
    told_again(run)


def test_a_golden_file_of_the_other_kind_is_refused_before_the_start(golden: Launcher) -> None:
    ours = golden.cwd / "ours.json"
    ours.write_bytes(msgspec.json.encode(golden_of_training()))
    command = ("--", sys.executable, str(COMMAND))
    for run, what in (
        (check(golden, "--golden=ours.json", *command), "our own training, and a command of"),
        (golden("--golden=g.json"), "a command of your own, and our own training runs here"),
    ):
        assert run.exit_code == 2, run.output
        assert f"it holds the bits of {what}" in run.output
    written = golden.verb("report", "run", "--golden", "ours.json")
    assert written.returncode == 75
    assert "not comparable: it holds the bits of our own training, and a comm" in written.stdout


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
