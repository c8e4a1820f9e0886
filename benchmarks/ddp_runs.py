"""Is the right rank named, and does a job go on to the same bits, every time?

    python -m benchmarks.ddp_runs [--mode fsdp] [--drills N] [--flips N] [--kills N] [--restarts N]
        [--seed S] [--jobs 2]

Each run is `bash run.sh --mode ddp` (or fsdp) on 2 or 3 CPU ranks; steps, ranks, tensors, moments
are drawn by a seed. N is for each kind:

- drills: a rank raises, exits, hangs, is SIGSTOPped, meets a NaN in a gradient, in the loss, in a
  forward pass. The rank and the exit code must be the right ones, and no process may be left.
- flips: one bit in a weight, a moment or a summed gradient; 3 ranks. Rank, step and tensor.
- kills: SIGKILL for one rank, for all, for the launcher, or in the middle of a save; then `--resume
  auto`. Losses and norms of all steps must be those of a run without it, to the bit.
- restarts: SIGKILL for one rank under `--max-restarts 1`; the same.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ddp import family, is_rank, is_there
from model_check.config.schema import ModelSettings
from model_check.config.shape import parameters
from model_check.engine.saving.checkpoint_files import unfinished
from model_check.errors import EXIT_DISAGREEMENT, EXIT_HANG, EXIT_NON_FINITE
from tests.e2e.conftest import ROOT, TINY

NUM_STEPS = 10
NUM_LONG = 60
"""Of a job that is killed: it must not end before."""
NUM_LAYERS = 2
LONG = f"training.max_steps={NUM_LONG}"
DEADLINE_S = 300
PARAMETERS = tuple(row.name for row in parameters(ModelSettings(num_layers=NUM_LAYERS)))
DRILLS = {
    "raise": 1,
    "exit7": 7,
    "hang": EXIT_HANG,
    "stop": EXIT_HANG,
    "nan": EXIT_NON_FINITE,
    "loss_nan": EXIT_NON_FINITE,
    "nan_forward": EXIT_NON_FINITE,
}
FLIPS = ("flip", "flip_moment", "flip_gradient")
KILLS = ("rank", "all", "launcher", "save")
Bits = dict[int, tuple[str, str]]
"""Step -> loss and norm."""


class Verdict(NamedTuple):
    kind: str
    is_right: bool
    told: str


class Lab:
    """Runs jobs, with one token cache for all."""

    def __init__(self, directory: Path, mode: str) -> None:
        self._dir, self.mode = directory, mode
        self._cache = directory / "cache"
        self._undisturbed: dict[int, Bits] = {}
        for num_ranks in (2, 3):
            place = self.place(f"undisturbed{num_ranks}")
            job = self.start(place, num_ranks, LONG)
            assert job.wait(DEADLINE_S) == 0
            self._undisturbed[num_ranks] = _bits(place / "run")

    def place(self, name: str) -> Path:
        path = self._dir / name
        path.mkdir()
        training = TINY["training"] | {"max_steps": NUM_STEPS}
        settings = TINY | {
            "training": training,
            "model": TINY["model"] | {"num_layers": NUM_LAYERS},
        }
        (path / "tiny.json").write_text(json.dumps(settings))
        return path

    def start(
        self, place: Path, num_ranks: int, *options: str, run: str = "run"
    ) -> "subprocess.Popen[bytes]":
        env = {**os.environ, "DATASET_CACHE_DIR": str(self._cache), "OMP_NUM_THREADS": "1"}
        command = ["bash", str(ROOT / "run.sh"), "--mode", self.mode, "--config", "tiny.json"]
        command += ["--workers", str(num_ranks), "--run-dir", str(place / run), *options]
        return subprocess.Popen(
            command,
            cwd=place,
            env=env | {"MODEL_CHECK_HISTORY_FILE": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def is_undisturbed(self, num_ranks: int, *runs: Path, may_lack: bool = False) -> bool:
        """Whether these runs together took every step to the bits of one without a fault.
        `may_lack`: a step that nobody told of may lie between the runs."""
        found: Bits = {}
        for run in runs:
            found |= _bits(run)
        wanted = self._undisturbed[num_ranks]
        steps = found if may_lack else range(max(found) + 1)
        return found == {step: wanted[step] for step in steps}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for kind in ("drills", "flips", "kills", "restarts", "seed"):
        parser.add_argument(f"--{kind}", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--mode", choices=["ddp", "fsdp"], default="ddp")
    names = parser.parse_args(argv)
    draw, began = random.Random(names.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(names.jobs) as pool:
        lab = Lab(Path(scratch), names.mode)
        tasks = [pool.submit(task) for task in _tasks(lab, names, draw)]
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for task in tasks:
            verdict = task.result()
            total[verdict.kind] += 1
            right[verdict.kind] += verdict.is_right
            if not verdict.is_right:
                print(f"WRONG {verdict.kind}: {verdict.told}", flush=True)
    for kind, count in total.items():
        print(f"{kind:22} {right[kind]} of {count} right")
    print(f"seed {names.seed}, {total.total()} rounds, {time.monotonic() - began:.0f} s")


def _tasks(
    lab: Lab, names: argparse.Namespace, draw: random.Random
) -> Iterator[Callable[[], Verdict]]:
    """In turns, so that a cut campaign has some of each."""
    counts = {
        _drilled: (names.drills, tuple(DRILLS)),
        _flipped: (names.flips, FLIPS),
        _killed: (names.kills, KILLS),
        _restarted: (names.restarts, ("rank",)),
    }
    for number in range(max(count for count, _ in counts.values())):
        for judge, (count, kinds) in counts.items():
            for kind in kinds if number < count else ():
                place = lab.place(f"{judge.__name__}_{kind}_{number}")
                own = random.Random(draw.random())
                yield lambda judge=judge, kind=kind, place=place, own=own: judge(
                    lab, place, kind, own
                )


def _drilled(lab: Lab, place: Path, kind: str, draw: random.Random) -> Verdict:
    num_ranks = draw.choice((2, 3))
    worker, step = f"CPU{draw.randrange(num_ranks)}", draw.randrange(1, NUM_STEPS)
    options = ["launch.rank_timeout_s=4"]
    if kind != "stop":
        options.append(f"debug.drill={kind}@{step}:{worker}")
    else:
        options.append("training.max_steps=100000")
    job = lab.start(place, num_ranks, *options)
    if kind == "stop":
        _wait_for(place / "run", step)
        os.kill(_ranks(job)[int(worker[3:])], signal.SIGSTOP)
    others = family(job.pid)
    code = job.wait(DEADLINE_S)
    culprits = _report(place)["culprits"]
    left = [pid for pid in others if is_there(pid)]
    told = f"{worker} at {step} of {num_ranks}: {culprits}, exit {code}, {len(left)} left"
    return Verdict(kind, culprits == [worker] and code == DRILLS[kind] and not left, told)


def _flipped(lab: Lab, place: Path, kind: str, draw: random.Random) -> Verdict:
    worker, step = f"CPU{draw.randrange(3)}", draw.randrange(1, NUM_STEPS)
    name, bit = draw.choice(PARAMETERS), draw.randrange(32)
    code = lab.start(place, 3, f"debug.drill={kind}@{step}:{worker}:{name}:{bit}").wait(DEADLINE_S)
    report = _report(place)
    summary = report["summary"]
    when = f"step {step}" in summary or f"after the update of step {step - 1}" in summary
    # A gradient that is not finite is told by its module.
    is_right = report["culprits"] == [worker] and when and name.removesuffix(".weight") in summary
    told = f"{worker} at {step}, {name} bit {bit}: exit {code}, {summary}"
    return Verdict(kind, is_right and code in (EXIT_DISAGREEMENT, EXIT_NON_FINITE), told)


def _killed(lab: Lab, place: Path, kind: str, draw: random.Random) -> Verdict:
    num_ranks, step = draw.choice((2, 3)), draw.randrange(2, NUM_LONG // 2)
    saving = "training.save_interval=1" if kind == "save" else "training.save_interval=2"
    beside = f"training.async_save={draw.choice(('true', 'false'))}"
    job = lab.start(place, num_ranks, saving, beside, LONG)
    if kind == "save":
        _wait_for(place / "run", step)
        _wait_for_a_save(place / ".checkpoints")
    else:
        _wait_for(place / "run", step)
    ranks, everybody = _ranks(job), family(job.pid)
    launcher = next(pid for pid in everybody if _runs_launcher(pid))
    # Of a file the first rank is the writer.
    writer = ranks[0] if lab.mode == "ddp" else draw.choice(ranks)
    victims = {"rank": [draw.choice(ranks)], "all": ranks, "launcher": [launcher], "save": [writer]}
    for pid in victims[kind]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait(DEADLINE_S)
    _wait_until_gone(everybody)
    done = max(_bits(place / "run"))
    rest = lab.start(place, num_ranks, saving, beside, LONG, "--resume", "auto", run="rest")
    code = rest.wait(DEADLINE_S)
    # A launcher that was killed heard of no step that its ranks took, and saved, afterwards.
    runs, may_lack = (place / "run", place / "rest"), kind == "launcher"
    same = lab.is_undisturbed(num_ranks, *runs, may_lack=may_lack)
    is_whole = done < NUM_LONG - 1 and max(_bits(place / "rest")) == NUM_LONG - 1
    told = f"after step {done} of {num_ranks} ranks, {beside}: exit {code}, "
    told += f"whole {is_whole}, same {same}"
    return Verdict(f"kill {kind}", code == 0 and same and is_whole, told)


def _restarted(lab: Lab, place: Path, kind: str, draw: random.Random) -> Verdict:
    num_ranks, step = draw.choice((2, 3)), draw.randrange(1, NUM_STEPS)
    worker = f"CPU{draw.randrange(num_ranks)}"
    drill = f"debug.drill=kill@{step}:{worker}"
    options = ("--max-restarts", "1", "training.save_interval=2", drill)
    code = lab.start(place, num_ranks, *options).wait(DEADLINE_S)
    rest = place / "run" / "restart_1"
    same = lab.is_undisturbed(num_ranks, place / "run", rest)
    is_whole = max(_bits(rest)) == NUM_STEPS - 1
    told = f"{worker} at {step} of {num_ranks}: exit {code}, whole {is_whole}, same {same}"
    return Verdict(f"restart {kind}", code == 0 and same and is_whole, told)


def _report(place: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((place / "run" / "report.json").read_text())
    return report


def _bits(run: Path) -> Bits:
    found: Bits = {}
    with suppress(FileNotFoundError):
        for line in (run / "cpu0.events.jsonl").read_text().splitlines(keepends=True):
            if line.endswith("\n") and (event := json.loads(line))["kind"] == "step":
                found[event["step"]] = event["loss"], event["grad_norm"]
    return found


def _wait_for(run: Path, step: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while step not in _bits(run):
        assert time.monotonic() < until, "the step never came"
        time.sleep(0.01)


def _wait_for_a_save(directory: Path) -> None:
    """Of a file, or of a directory that has no manifest yet."""
    until = time.monotonic() + DEADLINE_S
    while not any(directory.glob(".*.tmp")) and not unfinished(directory):
        assert time.monotonic() < until, "nothing was saved"


def _wait_until_gone(pids: Sequence[int]) -> None:
    until = time.monotonic() + DEADLINE_S
    while any(map(is_there, pids)):
        assert time.monotonic() < until, "somebody is left"
        time.sleep(0.01)


def _ranks(job: "subprocess.Popen[bytes]") -> list[int]:
    """Their pids, in the order of the ranks."""
    pids = family(job.pid)
    found = [next((p for p in pids if is_rank(p, rank)), None) for rank in range(3)]
    return [pid for pid in found if pid is not None]


def _runs_launcher(pid: int) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"launcher" in words and b"-m" in words
    return False


if __name__ == "__main__":
    main()
