"""How long after its deadline a run is over, and whether anybody is left.

    python -m benchmarks.deadline [--rounds 20] [--seconds 20]

Each round is `bash run.sh` with a training that would need minutes, some with a worker that hangs,
heeds no SIGTERM, or meets a NaN just before.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINGERS = {"PYTHONPATH": str(ROOT / "tests" / "e2e" / "in_workers"), "LINGERS": "CPU1"}
KINDS: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("trains", (), {}),
    ("hangs", ("debug.drill=hang@5:CPU1",), {}),
    ("heeds no SIGTERM", ("--grace", "600"), LINGERS),
    ("trains large steps", ("training.context_length=512", "training.batch_size=16"), {}),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    names = parser.parse_args(argv)
    late: list[float] = []
    for number in range(names.rounds):
        what, options, environ = KINDS[number % len(KINDS)]
        after_s, code, left = one(names.seconds, options, environ)
        late.append(after_s)
        print(f"{what:20} exit {code:3}  {after_s:+.2f} s after  {left} left", flush=True)
    extent = f"{min(late):+.2f} to {max(late):+.2f}"
    print(f"{len(late)} rounds: {statistics.median(late):+.2f} ({extent}) s")


def one(seconds: float, options: Sequence[str], environ: dict[str, str]) -> tuple[float, int, int]:
    """(seconds after the deadline, exit code, processes of the run that are left)"""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "run"
        command = ["bash", str(ROOT / "run.sh"), "--device", "cpu", "--workers", "3"]
        command += ["--run-dir", str(place), "--max-steps", "1000000", "--deadline", str(seconds)]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "launch.history_file=", *options],
            cwd=scratch,
            env={**os.environ, **environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        after_s = time.monotonic() - began - seconds
        return after_s, done.returncode, len(processes_of(place))


def processes_of(directory: Path) -> list[str]:
    tag = f"MODEL_CHECK_RUN_DIR={directory}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if tag in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
