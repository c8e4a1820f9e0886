"""What `run.sh watch` takes of a core beside a run of 8 GPUs, and of the run beside it; and what a
run's own live table takes of it.

    python -m benchmarks.watch [--seconds 60] [--rounds 8]

First a run is written as 8 workers would, each with STEPS_PER_S steps a second, and watched on a
terminal of 200 x 50: user and system time of the watcher. Then real runs of 2 CPU workers in turns:
watched, on a terminal with its table, on one with --plain, and with neither; the ratios of their
speeds.
"""

import argparse
import json
import os
import pty
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl
from itertools import islice
from pathlib import Path

from benchmarks.page import Case, events, write_run
from model_check.events import Step, encode

STEPS_PER_S = 5
WAYS = ("alone", "watched", "table", "plain")
ROOT = Path(__file__).parents[1]
RUN = ("training.max_steps=150", "launch.history_file=", "model.num_layers=2", "--workers", "2")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=8)
    names = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        share = share_of_a_core(Path(scratch) / "written", names.seconds)
        print(
            f"watch, 8 GPUs x {STEPS_PER_S} steps/s, {names.seconds:.0f} s: {share:.2%} of a core"
        )
        rounds = [speeds(Path(scratch), number) for number in range(names.rounds)]
    for way in WAYS[1:]:
        ratios = [each[way] / each[WAYS[0]] for each in rounds]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(
            f"tokens/s {way} / alone: {middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs)"
        )


def share_of_a_core(directory: Path, seconds: float) -> float:
    case = Case("", 8, 10_000)
    write_run(Case("", 8, 0), directory)
    mark_running(directory)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with watched(directory):
        step_by_step(case, directory, seconds)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used / seconds


def mark_running(directory: Path) -> None:
    """Its launcher is this process, which calls itself one."""
    path = directory / "run.json"
    record = json.loads(path.read_text())
    for name in ("end", "ended", "duration_s"):
        record.pop(name)
    path.write_text(json.dumps(record | {"pid": os.getpid(), "host": os.uname().nodename}))


def step_by_step(case: Case, directory: Path, seconds: float) -> None:
    told = [(e for e in events(case, at) if isinstance(e, Step)) for at in range(case.num_gpus)]
    paths = [directory / f"gpu{at}.events.jsonl" for at in range(case.num_gpus)]
    began = time.monotonic()
    for tick in range(round(seconds * STEPS_PER_S)):
        for path, worker in zip(paths, told, strict=True):
            with path.open("ab") as file:
                file.writelines(map(encode, islice(worker, 1)))
        time.sleep(max(0.0, began + (tick + 1) / STEPS_PER_S - time.monotonic()))


@contextmanager
def terminal() -> Iterator[int]:
    """One that takes what it is sent."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    threading.Thread(target=drain, args=(ours,), daemon=True).start()
    try:
        yield theirs
    finally:
        os.close(theirs)


@contextmanager
def watched(directory: Path) -> Iterator[None]:
    """By `watch`, on a terminal of its own; a request ends it."""
    command = [sys.executable, "-m", "launcher", "watch", str(directory)]
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    with terminal() as fd:
        process = subprocess.Popen(command, stdin=fd, stdout=fd, stderr=fd, env=env)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:
        return


def speeds(scratch: Path, number: int) -> dict[str, float]:
    """Tokens/s of a run in each way; another one is the first each time."""
    at = number % len(WAYS)
    return {way: speed(scratch / f"run{number}{way}", way) for way in WAYS[at:] + WAYS[:at]}


def speed(directory: Path, way: str) -> float:
    plain = ["--plain"] if way == "plain" else []
    command = [sys.executable, "-m", "launcher", "--run-dir", str(directory), *plain, *RUN]
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    with terminal() as fd:
        out = fd if way in ("table", "plain") else quiet
        run = subprocess.Popen(command, stdin=quiet, stdout=out, stderr=out, env=env)
        while not (directory / "cpu0.events.jsonl").exists() and run.poll() is None:
            time.sleep(0.05)
        if way == "watched":
            with watched(directory):
                run.wait()
        run.wait()
    report = json.loads((directory / "report.json").read_text())
    return statistics.mean(worker["tokens_per_s"] for worker in report["workers"])


if __name__ == "__main__":
    # `report` and `watch` know a launcher that lives by its command line.
    if "launcher" not in " ".join(sys.argv):
        os.execv(
            sys.executable, [sys.executable, "-m", "benchmarks.watch", *sys.argv[1:], "--launcher"]
        )
    sys.argv.remove("--launcher")
    main()
