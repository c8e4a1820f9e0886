"""How far a pip is, by its own words."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.install.progress import BEGINS, state_of
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]
COLLECTS = """\
Looking in links: /wheels
Collecting torch==2.13.0 (from -r requirements.txt (line 3))
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
Processing /wheels/numpy-2.4.0-cp311-cp311-manylinux_2_28_x86_64.whl
"""
DOWNLOADS = f"""{COLLECTS}\
Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (899.8 MB)
   ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 899.8/899.8 MB 9.1 MB/s eta 0:00:00
"""


@pytest.mark.parametrize(
    ("log", "state"),
    [
        ("", "packages found: 0"),
        (COLLECTS, "packages found: 2"),
        (DOWNLOADS, "packages found: 2, downloading torch (899.8 MB)"),
        (
            f"{DOWNLOADS}  Downloading https://a/b/nvidia_nccl_cu13-2.28-py3-none-any.whl (2 MB)\n",
            "packages found: 2, downloading nvidia_nccl_cu13 (2 MB)",
        ),
        (f"{DOWNLOADS}Installing collected packages: torch, numpy\n", "installing 2 packages"),
        (f"Installing collected packages: pip\n{BEGINS}pip\n{COLLECTS}", "packages found: 2"),
    ],
)
def test_the_line_says_what_pip_does_now(log: str, state: str) -> None:
    assert state_of(log) == state


FOLLOW = """
import subprocess, sys, time
from pathlib import Path
from launcher.install.progress import follow
log = Path(sys.argv[1])
pip = subprocess.Popen(["sh", "-c", "echo Collecting a; read until; exit 3"], stdout=log.open("wb"))
sys.exit(follow(pip, log, time.monotonic()))
"""


def test_a_terminal_has_one_line_that_is_rewritten_and_gone_at_the_end(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, tmp_path / "log"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while b"packages found: 1, " not in shown:  # the pip waits for us
        shown += os.read(terminal, 4096)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
    assert shown.startswith(b"\r[launcher] packages found: ")
    last = b""
    while chunk := _read(terminal):
        last = chunk
    os.close(terminal)
    assert b"\n" not in shown + last
    assert last.split(b"\r")[-2].strip() == b""


def _read(terminal: int) -> bytes:
    """Nothing where its other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
