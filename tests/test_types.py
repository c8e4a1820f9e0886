"""mypy is one of the tests: in a process of its own, it takes as long as the longest of them, and
runs beside the others."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_types_hold() -> None:
    command = (sys.executable, "-m", "mypy", "--no-color-output")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
