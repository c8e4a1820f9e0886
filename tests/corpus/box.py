"""`python -m tests.corpus.box ARGUMENT ...`: the launcher on a box of four fake GPUs.

One is healthy, one throttled, one has corrected memory errors, and one an Xid. A command waits on
each of them until telemetry has told all of it.
"""

import os
import sys
from pathlib import Path

from tests.e2e.test_telemetry import SAMPLED, gpu, wait_for
from tests.nvml_fake.build import build, environment, scenario, xid

GPUS = [gpu(0), gpu(1, clocks_event_reasons="0x48"), gpu(2, ecc_corrected="0|900"), gpu(3)]
WAITS = f"{SAMPLED}; {wait_for('gpu3.telemetry.jsonl', 'xid')}"

if __name__ == "__main__":
    library = Path("nvml")
    library.mkdir(exist_ok=True)
    scenario_file = Path("scenario").absolute()
    scenario_file.write_text(scenario(GPUS, [xid(3, 95)]))
    env = environment(build(library.absolute()), scenario_file)
    env["MODEL_CHECK_LOCK_DIR"] = str(Path("locks").absolute())
    command = (sys.executable, "-m", "launcher", *sys.argv[1:], "--", "sh", "-c", WAITS)
    os.execve(sys.executable, command, env)
