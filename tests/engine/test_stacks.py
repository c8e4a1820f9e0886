"""A worker's stacks, on a real signal to a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from model_check.engine.stacks import SIGNAL, offer_stacks
from model_check.events import STACKS_SIGNAL
from model_check.utils.worker_env import WorkerEnv
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
CODE = """
import os, pathlib, sys, threading
from model_check.engine.stacks import SIGNAL, offer_stacks
print(offer_stacks(pathlib.Path(sys.argv[1])))
def waits_for_ever(ready=threading.Event()):
    ready.set()
    threading.Event().wait()
ready = threading.Event()
threading.Thread(target=waits_for_ever, args=(ready,), daemon=True).start()
ready.wait()
os.kill(os.getpid(), SIGNAL)  # handled before the call returns
os.kill(os.getpid(), SIGNAL)
"""


def test_every_thread_is_written_and_the_process_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gpu3.stacks.txt"
    path.write_text("what was there before\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{{'{STACKS_SIGNAL}': {int(SIGNAL)}}}\n"
    text = path.read_text()
    assert text.startswith("what was there before\n")
    assert text.count("in <module>") == 2
    assert text.count("in waits_for_ever") == 2


def test_it_is_a_signal_that_nobody_else_sends() -> None:
    assert signal.SIGRTMIN < SIGNAL < signal.SIGRTMAX


def test_without_a_place_nothing_is_offered(tmp_path: Path) -> None:
    assert offer_stacks(None) == {}
    assert offer_stacks(tmp_path / "missing" / "gpu3.stacks.txt") == {}
    assert WorkerEnv.from_environ({}).stacks_path is None


def test_the_place_is_beside_the_log() -> None:
    environ = {"MODEL_CHECK_RUN_DIR": "/run/x", "MODEL_CHECK_WORKER": "GPU3.1"}
    assert WorkerEnv.from_environ(environ).stacks_path == Path("/run/x/gpu3.1.stacks.txt")
