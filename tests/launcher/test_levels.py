"""`run.sh check LEVEL`: what each level stands for, and what is said before it starts."""

import os
import subprocess
from pathlib import Path

import pytest

from launcher.arguments import parse_check
from launcher.levels import notes_on_level
from model_check.config.load import Loaded, load
from model_check.errors import UsageError
from tests.in_process import answer_of

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def loaded(*argv: str) -> Loaded:
    return load(parse_check(argv, {}).request, lambda: True)


def told(*argv: str, gpu: str) -> list[str]:
    level = parse_check(argv, {}).level
    return [*notes_on_level(level, loaded(*argv), {gpu}, None)]


@pytest.mark.parametrize(
    ("argv", "steps", "soak_s", "on_suspect"),
    [
        ([], 100, 0, "stop"),
        (["full"], 100, 0, "stop"),
        (["quick"], 20, 0, "stop"),
        (["quick", "--max-steps", "50"], 50, 0, "stop"),
        (["quick", "training.max_steps=50"], 50, 0, "stop"),
        (["quick", "training.max_iters=50"], 50, 0, "stop"),
        (["burnin"], 100, 3600, "continue"),
        (["burnin", "--soak", "8h", "--", "true"], 100, 28800, "continue"),
    ],
)
def test_a_level_stands_for_settings_below_those_that_are_given(
    argv: list[str], steps: int, soak_s: float, on_suspect: str
) -> None:
    settings = loaded(*argv).settings
    assert settings.training.max_steps == steps
    assert (settings.launch.soak_s, settings.launch.on_suspect) == (soak_s, on_suspect)


def plan_of(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    asked = ("check", *argv)
    return answer_of(*asked, cwd=cwd, env=dict(os.environ))


def test_a_check_of_a_command_says_what_is_compared_and_when_it_ends(tmp_path: Path) -> None:
    asked = ("quick", "--device=cpu", "--seed=5", "--dry-run", "--", "tool")
    plan = plan_of(*asked, cwd=tmp_path).stdout.splitlines()
    for line in (
        "check quick: your command on all workers at once",
        "what its torch optimizers do is compared bit for bit; the command itself is not changed",
        "it ends after 20 steps",
        "random numbers seeded by --seed 5",
    ):
        assert f"[launcher] {line}" in plan
    env = next(line for line in plan if "MODEL_CHECK_SEED=5" in line)
    assert "MODEL_CHECK_HELD=1" in env
    assert "MODEL_CHECK_STOP_AFTER=19" in env
    full = plan_of("--device=cpu", "--dry-run", "--", "tool", cwd=tmp_path).stdout
    assert "STOP_AFTER" not in full
    assert "MODEL_CHECK_SEED" not in full
    assert "deterministic" not in full
    plain = ("--device=cpu", "--seed=5", "--dry-run", "--", "tool")
    told = answer_of(*plain, cwd=tmp_path, env=dict(os.environ)).stdout
    assert "MODEL_CHECK_INSTRUMENT" not in told


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ([], None),
        (["quick"], 20),
        (["quick", "training.max_steps=7"], 7),
        (["--max-steps=7"], 7),
        (["--preset=pretrain"], None),
    ],
)
def test_settings_of_our_own_training_are_nothing_for_a_command(
    tmp_path: Path, asked: list[str], steps: int | None
) -> None:
    """A file is for that, and a preset; whoever types it behind `check` means the command."""
    (tmp_path / "c.json").write_text(
        '{"training": {"max_steps": 50}, "system": {"seed": 3, "deterministic": true}}'
    )
    plan = ("--config=c.json", "--device=cpu", "--dry-run", "--", "tool")
    told = plan_of(*asked, *plan, cwd=tmp_path).stdout
    assert "MODEL_CHECK_INSTRUMENT" in told
    assert "MODEL_CHECK_SEED" not in told
    assert "MODEL_CHECK_DETERMINISTIC" not in told
    assert ("it ends after" in told, "STOP_AFTER" in told) == (steps is not None,) * 2
    if steps is not None:
        assert f"MODEL_CHECK_STOP_AFTER={steps - 1}" in told
        assert f"it ends after {steps} steps" in told


def test_deterministic_operations_are_for_a_command(tmp_path: Path) -> None:
    asked = ("--deterministic", "--device=cpu", "--dry-run")
    told = plan_of(*asked, "--", "tool", cwd=tmp_path).stdout
    assert "[launcher] deterministic operations by --deterministic" in told
    assert "MODEL_CHECK_DETERMINISTIC=1" in told
    refused = plan_of(*asked, cwd=tmp_path)
    assert refused.returncode == 2
    assert "check: --deterministic is for `-- COMMAND`" in refused.stderr


def test_a_settings_file_counts_more_than_a_level(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"training": {"max_steps": 50}}')
    argv = ["quick", "--config", str(tmp_path / "c.json")]
    assert loaded(*argv).settings.training.max_steps == 50
    assert loaded("quick", "--debug").settings.training.max_steps == 20


def test_a_check_without_a_gpu_is_no_pass_of_the_cpu(tmp_path: Path) -> None:
    for argv in (["check"], ["check", "quick", "--workers", "2"]):
        answer = answer_of(*argv, "--dry-run", cwd=tmp_path, env=dict(os.environ))
        assert answer.returncode == 69
        assert " needs a GPU: no NVIDIA driver" in answer.stderr
    answer = answer_of("check", "--gpu", "3", "--dry-run", cwd=tmp_path, env=dict(os.environ))
    assert "--gpu: GPUs were asked for (launch.gpus = '3')" in answer.stderr


def test_a_level_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="'burn'; there are quick, full, burnin"):
        parse_check(["burn"], {})


@pytest.mark.parametrize(
    ("argv", "gpu", "time"),
    [
        (["quick"], H100, "it takes about 12 s (by times measured on one H100)"),
        (["full"], H100, "it takes about 30 s (by times measured on one H100)"),
        (["full", "data.dataset=embedded"], H100, "(by times measured on one H100)"),
        (["full", "model.num_layers=2"], H100, "(computed, not measured)"),
        (["burnin"], A100, "each round takes about 61 s (computed, not measured)"),
        (["full"], "Tesla V100", "a time that is not known for this GPU and these settings"),
        (["full", "--debug"], H100, "a time that is not known for this GPU and these settings"),
    ],
)
def test_what_a_check_takes_is_measured_computed_or_not_known(
    argv: list[str], gpu: str, time: str
) -> None:
    assert time in told(*argv, gpu=gpu)[1]


def test_before_it_starts_a_check_says_what_runs_and_what_it_does_not_test(tmp_path: Path) -> None:
    what, _, not_tested = told("burnin", gpu=A100)
    assert what.endswith(" 100 training steps on all workers at once, again and again for 1 h")
    assert not_tested.startswith("not tested: memory, PCIe and NVLink bandwidth, power; dcgmi")
    asked = ("check", "quick", "--device", "cpu", "--dry-run")
    plan = answer_of(*asked, cwd=tmp_path, env=dict(os.environ)).stdout.splitlines()
    assert "[launcher] check quick: the same 20 training steps on all workers at once" in plan
    assert "[launcher] how long it takes on a CPU is not known; not tested: GPUs" in plan
