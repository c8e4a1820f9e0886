"""What telemetry costs: CPU of supervisor and sampler, and the time that it adds to a run.

`python -m benchmarks.telemetry [SECONDS]`: 8 fake GPUs whose driver answers at once, so the figures
do not include a driver's own time. Runs with and without telemetry alternate.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.nvml_fake.build import build, environment, fake_gpu, scenario

ROOT = Path(__file__).parents[1]
NUM_GPUS, NUM_PAIRS = 8, 15
INTERVALS_S = (0.0, 1.0, 0.1)
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file = directory / "scenario"
        more: dict[str, int | str] = {"power_mw": 1, "ecc_corrected": 0, "event_types": 31}
        file.write_text(scenario(fake_gpu(i, utilization=9, more=more) for i in range(NUM_GPUS)))
        env = environment(build(directory), file)
        env |= {"PYTHONPATH": str(ROOT), "MODEL_CHECK_LOCK_DIR": str(directory / "locks")}
        env["MODEL_CHECK_HISTORY_FILE"] = ""
        print(f"{NUM_GPUS} GPUs; share of one core over {seconds:g} s, resident memory")
        for interval_s in INTERVALS_S:
            print(_steady(directory, env, interval_s, seconds))
        _lengths(directory, env)


def _start(directory: Path, env: dict[str, str], interval_s: float, command: str) -> list[str]:
    where = tempfile.mkdtemp(dir=directory)
    options = ("--run-dir", where, f"launch.telemetry_interval_s={interval_s}")
    return [sys.executable, "-m", "launcher", *options, "--", "sleep", command]


def _steady(directory: Path, env: dict[str, str], interval_s: float, seconds: float) -> str:
    argv = _start(directory, env, interval_s, str(seconds + 60))
    launcher = subprocess.Popen(argv, cwd=directory, env=env, stdout=subprocess.DEVNULL)
    try:
        time.sleep(2)  # started and settled
        pids = [launcher.pid, *_samplers(launcher.pid)]
        before = [_cpu_s(pid) for pid in pids]
        time.sleep(seconds)
        shares = [(_cpu_s(pid) - b) / seconds for pid, b in zip(pids, before, strict=True)]
        memory = [_resident_mib(pid) for pid in pids]
    finally:
        launcher.terminate()
        launcher.wait()
    costs = [f"{s:6.2%} {m:4.0f} MiB" for s, m in zip(shares, memory, strict=True)]
    names = ("supervisor", "sampler")
    told = "   ".join(f"{n} {c}" for n, c in zip(names, costs, strict=False))
    return f"every {interval_s:g} s   {told}" if interval_s else f"none        {told}"


def _lengths(directory: Path, env: dict[str, str]) -> None:
    """Whole runs of `sleep 0.5`, in pairs."""
    added = []
    for _ in range(NUM_PAIRS):
        took = {}
        for interval_s in (0.0, 1.0):
            started = time.perf_counter()
            argv = _start(directory, env, interval_s, "0.5")
            subprocess.run(argv, cwd=directory, env=env, stdout=subprocess.DEVNULL, check=True)
            took[interval_s] = time.perf_counter() - started
        added.append(1000 * (took[1.0] - took[0.0]))
    middle, low, high = statistics.median(added), min(added), max(added)
    print(f"added to a run: median {middle:.0f} ms ({low:.0f} to {high:.0f}, {NUM_PAIRS} pairs)")


def _samplers(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"sampler" in Path(f"/proc/{c}/cmdline").read_bytes()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident_mib(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
