"""One job on two CPU ranks: `run.sh --mode ddp` beside torchrun with a plain DDP script.

    python -m benchmarks.ddp [--rounds 8] [--ranks 2] [--steps 24] [--settings FILE]

They take turns in one run, so that noise hits them alike; what counts is the ratio within a round,
its median and quartiles. Both train the same model on the same batches; losses must agree.

- tokens/s: of the steps behind the third, by the stamps of the steps.
- to first step: from the command's start to the end of its first step, over a token cache that is
  there.
- all gone: one rank is killed after its fifth step; until the command and all its processes are
  gone.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "benchmarks" / "ddp_peer" / "train.py"
NUM_WARM = 3
KILL_AT = 5
DEADLINE_S = 600


@dataclass
class Job:
    """A running command, and the steps that it told."""

    process: "subprocess.Popen[str]"
    began: int
    steps: Callable[[], list[dict[str, Any]]]
    directory: Path
    """Of its run, of ours."""

    def wait_for_step(self, number: int) -> None:
        until = time.monotonic() + DEADLINE_S
        while len(self.steps()) <= number:
            assert self.process.poll() is None, "it ended before"
            assert time.monotonic() < until, "no step came"
            time.sleep(0.005)

    def finish(self) -> list[dict[str, Any]]:
        assert self.process.wait(DEADLINE_S) == 0
        return self.steps()

    def kill_a_rank(self) -> float:
        """Seconds until nothing of the job is left."""
        self.wait_for_step(KILL_AT)
        others = family(self.process.pid)
        victim = next(pid for pid in others if is_rank(pid, 1))
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        while any(is_there(pid) for pid in others):
            time.sleep(0.001)
        return time.monotonic() - began


class Lab:
    """Starts jobs in a directory of their own."""

    mode, peer = "ddp", PEER

    def __init__(self, directory: Path, settings: dict[str, Any], num_ranks: int) -> None:
        self._dir = directory
        self._num_ranks = num_ranks
        self._settings = directory / "settings.json"
        self._settings.write_text(json.dumps(settings))
        self._number = 0
        threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
        self._env = {**os.environ, "MODEL_CHECK_HISTORY_FILE": "", "OMP_NUM_THREADS": threads}
        self._env |= {"DATASET_CACHE_DIR": str(directory / "cache"), "GLOO_SOCKET_IFNAME": "lo"}
        self._cache = self._prepare()

    def ours(self, *overrides: str) -> Job:
        run = self._fresh()
        command = ["bash", str(ROOT / "run.sh"), "--device", "cpu", "--config", str(self._settings)]
        command += ["--mode", self.mode, "--workers", str(self._num_ranks)]
        command += ["--run-dir", str(run / "run"), *overrides]
        began = time.monotonic_ns()
        process = self._start(command, run, subprocess.DEVNULL)
        events = run / "run" / "cpu0.events.jsonl"
        return Job(process, began, lambda: _steps(events), run / "run")

    def theirs(self) -> Job:
        run = self._fresh()
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(self._num_ranks)]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(self.peer)]
        command += [str(self._settings), str(self._cache)]
        out = (run / "out").open("w")
        began = time.monotonic_ns()
        process = self._start(command, run, out)
        out.close()
        return Job(process, began, lambda: _lines(run / "out"), run)

    def _start(self, command: Sequence[str], cwd: Path, out: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={**self._env, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _fresh(self) -> Path:
        self._number += 1
        path = self._dir / f"job{self._number}"
        path.mkdir()
        return path

    def _prepare(self) -> Path:
        self.ours().finish()
        data = json.loads((self._dir / "job1" / "run" / "data.json").read_text())
        return Path(data["path"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--settings", nargs="*", default=(), metavar="section.key=value")
    names = parser.parse_args(argv)
    training = {"max_steps": names.steps, "grad_accum_nums": 2, "batch_size": 4}
    settings = {"training": training, "data": {"dataset": "embedded"}, "system": {"device": "cpu"}}
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch), settings, names.ranks)
        rates, starts, ends, furthest = [], [], [], 0.0
        for number in range(names.rounds):
            pair = [lambda: lab.ours(*names.settings), lab.theirs]
            found = {}
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                job = pair[which]()
                found[which] = (job.began, job.finish())
            (began, mine), (their_began, their) = found[0], found[1]
            furthest = max(furthest, *apart(mine, their))
            rates.append(rate(mine) / rate(their))
            starts.append((_first_s(began, mine), _first_s(their_began, their)))
            ends.append((lab.ours().kill_a_rank(), lab.theirs().kill_a_rank()))
            print(
                f"round {number + 1}: steps/s x {rates[-1]:.3f}; first step {starts[-1][0]:.2f} "
                f"and {starts[-1][1]:.2f} s; all gone {ends[-1][0]:.3f} and {ends[-1][1]:.3f} s",
                flush=True,
            )
    print(f"losses differ by {furthest:.1e} at most")
    print(f"tokens/s, ours / theirs: {spread(rates)}")
    for what, times in (("to first step", starts), ("all gone", ends)):
        own, their = [statistics.median(side) for side in zip(*times, strict=True)]
        ratios = [theirs / ours for ours, theirs in times]
        print(f"{what}: {own:.3f} s, torchrun {their:.3f} s; {spread(ratios)} times")


def spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def rate(steps: Sequence[dict[str, Any]]) -> float:
    """Steps a second: both train as many tokens in each. The median: a step that another process
    disturbs says nothing."""
    stamps = [step["t"] for step in steps[NUM_WARM:]]
    return 1e9 / statistics.median(after - before for before, after in pairwise(stamps))


def _first_s(began: int, steps: Sequence[dict[str, Any]]) -> float:
    return float(steps[0]["t"] - began) / 1e9


def apart(mine: Sequence[dict[str, Any]], their: Sequence[dict[str, Any]]) -> list[float]:
    return [abs(a["loss"] - b["loss"]) for a, b in zip(mine, their, strict=True)]


def _steps(path: Path) -> list[dict[str, Any]]:
    events = [line for line in _lines(path) if line["kind"] == "step"]
    return [event | {"loss": float.fromhex(event["loss"])} for event in events]


def _lines(path: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def family(pid: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def is_rank(pid: int, rank: int) -> bool:
    with suppress(OSError):
        return f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


if __name__ == "__main__":
    main()
