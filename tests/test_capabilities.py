"""A test that asks for a capability is skipped without it, and fails where it was promised."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[1]

Outcome = Callable[[str], str]
"""MODEL_CHECK_REQUIRE -> what pytest prints."""
TESTS = """\
import pytest

@pytest.mark.slurm
def test_of_a_cluster() -> None: ...

@pytest.mark.root
def test_that_gives_up() -> None:
    pytest.skip("no disk")

def test_of_anybody() -> None:
    pytest.skip("no flash_attn")
"""


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(required: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", str(tmp_path)]
        env = {**os.environ, "MODEL_CHECK_REQUIRE": required, "PATH": str(tmp_path)}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S
        )
        return done.stdout + done.stderr

    return run


def test_nothing_promised_nothing_fails(outcome: Outcome) -> None:
    assert "3 skipped" in outcome("")


def test_a_skip_of_what_was_promised_fails(outcome: Outcome) -> None:
    text = outcome("slurm,root")
    assert "MODEL_CHECK_REQUIRE=slurm, and it was skipped: this machine lacks slurm" in text
    assert "MODEL_CHECK_REQUIRE=root, and it was skipped: " in text
    assert "1 skipped" in text


def test_a_capability_that_nobody_knows_is_refused(outcome: Outcome) -> None:
    assert "MODEL_CHECK_REQUIRE: rot: no such capability" in outcome("root,rot")
