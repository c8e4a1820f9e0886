"""What checkpoints cost a run: written while training goes on, by the training thread, or not at
all.

`python benchmarks/checkpoints.py [--rounds N] [--preset NAME]` trains the same in this process with
each of the three ways, in turns. It prints the time that a run loses to its saves, and the time to
load a checkpoint.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch

from model_check.config.load import Request, load
from model_check.engine.assembly import build_trainer
from model_check.engine.checkpoint import read_checkpoint
from model_check.engine.metrics import Meter
from model_check.engine.run_context import Channels, Claim, Identity, RunContext
from model_check.engine.stop import StopSignal
from model_check.events import EventSink

WAYS = {
    "none": (),
    "waiting": ("training.save_interval=4", "training.async_save=false"),
    "beside": ("training.save_interval=4", "training.async_save=true"),
}
SHORT = ("training.max_steps=12", "training.batch_size=1", "training.context_length=128")
"""Short steps: there is little training during which a file can be written."""
VOCABULARY = 8192


@dataclass(frozen=True)
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor
    documents: None = None


class Source:
    def __init__(self, batch_size: int, length: int) -> None:
        tokens = torch.randint(0, VOCABULARY, (batch_size, length + 1))
        self.batch = Batch(tokens[:, :-1], tokens[:, 1:])

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        while True:
            yield self.batch


def run_s(way: str, preset: str, directory: Path) -> float:
    """Wall time of twelve steps with three saves, or with none."""
    overrides = (*SHORT, "system.device=cpu", *WAYS[way])
    settings = load(Request(preset=preset, overrides=overrides), lambda: False).settings
    context = RunContext(
        identity=Identity("CPU0"),
        channels=Channels(lambda _text: None, EventSink(None)),
        device=torch.device("cpu"),
        claim=Claim(directory),
        meter=Meter(),
        stop=StopSignal(),
    )
    source = Source(settings.training.batch_size, settings.training.context_length)
    trainer = build_trainer(settings, source, VOCABULARY, context)
    started = time.perf_counter()
    trainer.run()
    return time.perf_counter() - started


def spread(values: list[float], unit: str) -> str:
    return (
        f"median {statistics.median(values):8.1f} {unit} "
        f"({min(values):.1f} to {max(values):.1f}, {len(values)} runs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="cpu")
    options = parser.parse_args()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    loads = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for way, seconds in times.items():
                directory = Path(scratch) / f"{way}{number}"
                seconds.append(run_s(way, options.preset, directory))
        path = max(Path(scratch).rglob("step_12.pt"))
        for _ in range(options.rounds):
            started = time.perf_counter()
            read_checkpoint(path)
            loads.append((time.perf_counter() - started) * 1e3)
        size_mib = path.stat().st_size / 2**20
    for way in ("waiting", "beside"):
        lost = [(a - b) / 3 * 1e3 for a, b in zip(times[way], times["none"], strict=True)]
        print(f"lost to a save of {size_mib:.0f} MiB, {way:>8}: {spread(lost, 'ms')}")
    print(f"verifying and opening one:            {spread(loads, 'ms')}")


if __name__ == "__main__":
    main()
