"""Whether a run that cannot be understood looks like a job on several nodes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from launcher.nodes.absence import Absence
from launcher.part import reason
from model_check.errors import EXIT_USAGE, UsageError
from model_check.utils import secrets

ENVIRON = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}


@pytest.fixture(autouse=True)
def mask() -> Iterator[None]:
    """A launcher that others wait for blocks signals."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my.json", '{"launch": {"mode": "ddp"}}'),
        ("my.yaml", "launch:\n  mode: fsdp\n"),
        ("my.toml", "[launch]\nmode = 'ddp'\n"),
        ("my.json", "{launch: {mode: 'fsdp'}"),
    ],
    ids=["JSON", "YAML", "TOML", "JSON5 with a mistake"],
)
def test_a_file_names_the_job(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert Absence().guess(["--config", str(path), "trainin.max_steps=3"], ENVIRON)
    assert Absence().guess([f"--config={path}"], ENVIRON)
    assert not Absence().guess(["--config", str(path)], {})


def test_a_file_without_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("training:\n  max_steps: 3\n  resume: old_ddp_run/last.pt\n")
    assert not Absence().guess(["--config", str(path)], ENVIRON)


def test_the_other_nodes_hear_no_secret_of_this_environment() -> None:
    with mock.patch.dict(os.environ, {"A_PASS": "line one\nline two"}):
        secrets.look_again()
        told = reason(UsageError("not a name: line two"))
    secrets.look_again()
    assert told == ("not a name: ***", EXIT_USAGE)
