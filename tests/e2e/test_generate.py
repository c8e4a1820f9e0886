"""`run.sh generate` on what a run of the launcher has trained."""

import subprocess
import sys

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher


def test_a_trained_model_says_something_and_a_reader_may_leave(launcher: Launcher) -> None:
    run = launcher("training.save_last=true", "--workers=1")
    assert run.exit_code == 0, run.output
    asked = ("generate", ".checkpoints/cpu0", "--prompt=def ", "--max-tokens=8")
    told = launcher.verb(*asked, "--temperature=0")
    assert told.returncode == 0, told.stdout
    assert "8 tokens, max tokens; " in told.stdout
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", *asked],
        cwd=launcher.cwd,
        env=launcher.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(DEADLINE_S) == -13
