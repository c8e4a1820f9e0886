"""What a run is watched by: nothing that was not asked for is imported."""

import os
import subprocess
import sys

from tests.deadline import DEADLINE_S
from tests.engine.conftest import ROOT


def test_a_plain_run_imports_no_logger_profiler_or_compiler() -> None:
    heavy = "wandb tensorboard torch._dynamo torch._inductor"
    code = (
        "import sys, model_check.engine.assembly;"
        f"print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.strip() == "[]"
