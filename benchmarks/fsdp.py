"""One job whose CPU ranks share the model: `run.sh --mode fsdp` beside torchrun with accelerate's
FSDP2 (benchmarks/fsdp_peer; pip install accelerate); and the memory of a rank.

    python -m benchmarks.fsdp [--rounds 8] [--ranks 2] [--steps 24] [--settings KEY=VALUE ...]
    python -m benchmarks.fsdp --memory [--settings KEY=VALUE ...]

They take turns in one run, so that noise hits them alike; what counts is the ratio within a round,
its median and quartiles. Both train the same model on the same batches, and sum gradients after
each micro-batch; losses must agree.

- tokens/s: of the steps behind the third, by the stamps of the steps.
- memory: the largest resident set of rank 0.
- --memory: that of one process, of ddp and of fsdp on 2 and 4 ranks, with the state that each must
  hold: weights, gradients and moments in float32.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ddp import ROOT, Job, Lab, apart, rate, spread

PEER = ROOT / "benchmarks" / "fsdp_peer" / "train.py"
LARGE = ("model.num_layers=8", "model.hidden_size=512", "model.intermediate_size=1536")
"""So that state, and no library, is most of a worker's memory."""
SMALL_STEPS = {"max_steps": 3, "grad_accum_nums": 2, "batch_size": 1, "context_length": 128}
JOBS = (("replicate", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4))


class FsdpLab(Lab):
    mode, peer = "fsdp", PEER


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--settings", nargs="*", default=(), metavar="section.key=value")
    names = parser.parse_args(argv)
    training = {"max_steps": names.steps, "grad_accum_nums": 2, "batch_size": 4}
    settings = {"training": training, "data": {"dataset": "embedded"}, "system": {"device": "cpu"}}
    with tempfile.TemporaryDirectory() as scratch:
        if names.memory:
            print_memory(Path(scratch), settings, names.settings)
        else:
            print_speed(FsdpLab(Path(scratch), settings, names.ranks), names)


def print_speed(lab: Lab, names: argparse.Namespace) -> None:
    rates, sizes, furthest = [], [], 0.0
    for number in range(names.rounds):
        found: dict[int, tuple[list[dict[str, Any]], float]] = {}
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which] = of_theirs(lab.theirs()) if which else of_ours(lab, names.settings)
        (mine, my_gib), (their, their_gib) = found[0], found[1]
        furthest = max(furthest, *apart(mine, their))
        rates.append(rate(mine) / rate(their))
        sizes.append(my_gib / their_gib)
        print(
            f"round {number + 1}: tokens/s x {rates[-1]:.3f}; a rank takes {my_gib:.3f} and "
            f"{their_gib:.3f} GiB",
            flush=True,
        )
    print(f"losses differ by {furthest:.1e} at most")
    print(f"tokens/s, ours / accelerate's: {spread(rates)}")
    print(f"memory of a rank, ours / accelerate's: {spread(sizes)}")


def print_memory(scratch: Path, settings: dict[str, Any], more: Sequence[str]) -> None:
    print(
        "| job | ranks | state a rank holds | largest resident set of a rank |\n|---|---|---|---|"
    )
    for mode, num_ranks in JOBS:
        directory = scratch / f"{mode}{num_ranks}"
        directory.mkdir()
        lab = Lab(directory, {**settings, "training": SMALL_STEPS}, num_ranks)
        lab.mode = mode
        job = lab.ours(*LARGE, *more)
        steps = job.finish()
        run = Path(job.directory)
        shards = num_ranks if mode == "fsdp" else 1
        state = 16 * parameters_of(run) / shards / 2**30
        peaks = [peak_gib(run, f"cpu{number}") for number in range(num_ranks)]
        assert len(steps) == SMALL_STEPS["max_steps"]
        print(f"| {mode} | {num_ranks} | {state:.2f} GiB | {max(peaks):.2f} GiB |", flush=True)


def of_ours(lab: Lab, settings: Sequence[str]) -> tuple[list[dict[str, Any]], float]:
    """Its steps, and GiB of rank 0."""
    job = lab.ours(*settings)
    return job.finish(), peak_gib(job.directory, "cpu0")


def of_theirs(job: Job) -> tuple[list[dict[str, Any]], float]:
    steps = job.finish()
    return steps, steps[-1]["peak"] / 2**30


def peak_gib(run: Path, worker: str) -> float:
    return float(events(run, worker, "done")[-1]["peak_memory_bytes"]) / 2**30


def parameters_of(run: Path) -> int:
    told = [event.get("detail", {}) for event in events(run, "cpu0", "phase")]
    return next(int(detail["num_parameters"]) for detail in told if "num_parameters" in detail)


def events(run: Path, worker: str, kind: str) -> list[dict[str, Any]]:
    lines = (run / f"{worker}.events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


if __name__ == "__main__":
    main()
