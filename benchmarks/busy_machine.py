"""What a CPU worker loses beside other work: `python benchmarks/busy_machine.py [--rounds N]`.

Two threads beside spinning processes, one a core: each parallel loop ends when its slower thread
does, and a thread that waits by spinning takes the core that the slower one needs. The ways to wait
take turns; a row is a way, and its rate as a share of one thread's in the same round.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_CORES = len(os.sched_getaffinity(0))
WAYS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "a thread a core, libgomp's default": {},
    "a thread a core, OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
RATE = re.compile(r"Trained \d+ steps: .*?, ([\d,]+) tokens/s")


@contextmanager
def spinning(count: int) -> Iterator[None]:
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def rate(way: Mapping[str, str], directory: Path, steps: int) -> float:
    """Tokens a second of one training."""
    cores = {"OMP_NUM_THREADS": str(NUM_CORES)}
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--preset", "cpu"]
    command += [f"training.max_steps={steps}", "system.device=cpu", f"data.cache_dir={directory}"]
    done = subprocess.run(
        command, env=environ | cores | way, cwd=directory, capture_output=True, text=True
    )
    found = RATE.search(done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1].replace(",", ""))


def compare(num_spinners: int, rounds: int, steps: int, directory: Path) -> None:
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    with spinning(num_spinners):
        for _ in range(rounds):
            for name, way in WAYS.items():
                rates[name].append(rate(way, directory, steps))
    print(f"\n{num_spinners} spinning processes on {NUM_CORES} cores, {rounds} rounds, tokens/s")
    for name, values in rates.items():
        shares = [one / base for one, base in zip(values, rates["one thread"], strict=True)]
        print(
            f"{name:42} {statistics.median(values):8,.0f} ({min(values):,.0f} to "
            f"{max(values):,.0f})  x {statistics.median(shares):.2f} ({min(shares):.2f} to "
            f"{max(shares):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rate(WAYS["one thread"], Path(name), 2)  # prepares the tokens
        for num_spinners in (0, NUM_CORES):
            compare(num_spinners, options.rounds, options.steps, Path(name))


if __name__ == "__main__":
    main()
