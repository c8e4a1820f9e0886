"""Checkpoints of `--mode fsdp`, by the whole command: killed in a save, damaged, exported. The same
in pieces: tests/engine/saving/test_sharded.py and test_sharded_ranks.py, tests/e2e/test_ddp.py."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from model_check.engine.saving.checkpoint_files import unfinished
from model_check.engine.saving.lineage import newest_first
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher, pid_of
from tests.e2e.test_ddp import losses, named
from tests.e2e.test_run import read_until

pytestmark = pytest.mark.slow
JOB = ("--mode", "fsdp", "training.max_steps=60")
SAVES = ("training.save_interval=1", "training.keep_last=3")


def wait_for_a_save(directory: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not unfinished(directory):
        assert time.monotonic() < until, "nothing was saved"


def test_a_rank_killed_in_a_save_is_named_and_the_job_goes_on_to_the_same_bits(
    launcher: Launcher,
) -> None:
    whole = launcher(*JOB, "--run-dir", "whole")
    assert whole.exit_code == 0, whole.output
    process = launcher.start(*JOB, *SAVES)
    seen = read_until(process, "Step [3/")
    checkpoints = launcher.cwd / ".checkpoints"
    wait_for_a_save(checkpoints)
    os.kill(pid_of("CPU1", launcher.cwd / "run"), signal.SIGKILL)
    killed = launcher.finish(process, seen)
    assert killed.exit_code == 137, killed.output
    assert named(killed) == ["CPU1"]
    newest, before, *_ = newest_first(checkpoints)
    (shard,) = newest.glob("*/shard-00002-*")
    os.truncate(shard, 1000)
    rest = launcher(
        *JOB, *SAVES, "training.save_last=true", "--resume", "auto", "--run-dir", "rest"
    )
    assert rest.exit_code == 0, rest.output
    assert (
        f"Not resumed: .checkpoints/{newest.name}: {shard.name}: cut off: 1,000 of " in rest.output
    )
    assert f"Resumed from .checkpoints/{before.name}: " in rest.output
    undisturbed, found = losses(launcher.cwd / "whole"), losses(launcher.cwd / "rest")
    assert losses(killed.directory) | found == undisturbed
    assert min(found) == int(before.name.removeprefix("step_"))
    generated = launcher.verb("generate", ".checkpoints/last", "--prompt", "The", "--json")
    assert generated.returncode == 0, generated.stderr
    exported = launcher.verb("export", ".checkpoints", "HF")
    assert exported.returncode == 2
    exported = launcher.verb("export", ".checkpoints/last", "HF")
    assert exported.returncode == 0, exported.stderr
    config = json.loads((launcher.cwd / "HF" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert (launcher.cwd / "HF" / "tokenizer.json").is_file()


def test_a_rank_that_stops_in_a_save_is_the_one_that_is_silent(launcher: Launcher) -> None:
    process = launcher.start(*JOB, "training.max_steps=100000", *SAVES, "--hang-timeout", "8")
    seen = read_until(process, "Step [3/")
    stopped = pid_of("CPU1", launcher.cwd / "run")
    wait_for_a_save(launcher.cwd / ".checkpoints")
    os.kill(stopped, signal.SIGSTOP)
    run = launcher.finish(process, seen)
    assert run.exit_code == 124, run.output
    assert named(run) == ["CPU1"]
