"""What does the watch for NaN and Inf cost? `python -m benchmarks.watch_cost [PAIRS]`.

One process trains steps of the `cpu` preset with one thread, with the watch and without, in random
order within each pair, and compares the CPU time of each pair.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model_check.config.load import Request, load
from model_check.engine.assembly import build_trainer
from model_check.engine.batches import gather
from model_check.engine.metrics import Meter
from model_check.engine.run_context import Channels, Identity, RunContext
from model_check.engine.step import train_step
from model_check.engine.stop import StopSignal
from model_check.engine.trainer import Trainer
from model_check.engine.watch import Watch
from tests.engine.conftest import FakeSource, Kept

VOCABULARY = 8192
NUM_WARM_UP = 3


class NoWatch(Watch):
    """As before there was one."""

    def begin(self) -> None:
        pass

    def end_micro_batch(self) -> None:
        pass

    def details(self, grad_norms: Tensor) -> Tensor:
        return grad_norms[:0]

    def see(self, x_BTE: Tensor) -> None:
        pass


def trainer() -> Trainer:
    overrides = (f"model.vocab_size={VOCABULARY}", "training.max_steps=100000")
    settings = load(Request(preset="cpu", overrides=overrides), lambda: False).settings
    kept = Kept()
    context = RunContext(
        identity=Identity("CPU0"),
        channels=Channels(kept.say, kept),
        device=torch.device("cpu"),
        directory=Path("nowhere"),
        meter=Meter(),
        stop=StopSignal(),
    )
    source = FakeSource(settings.training.batch_size, settings.training.context_length)
    return build_trainer(settings, source, VOCABULARY, context)


def pairs(num: int) -> Iterator[tuple[float, float]]:
    """CPU seconds of a step with the watch, and of one without."""
    made = trainer()
    data = gather(made.source.batches(), 0, 1, made.plan.device)
    watched = made.plan
    plain = replace(watched, watch=NoWatch(made.state.model))
    for _ in range(num):
        took = {}
        for plan in random.sample([watched, plain], 2):
            made.state.model.watchers = (plan.watch.see, plan.fingerprints.see)
            began = time.process_time()
            result = train_step(made.state.model, data, made.state.optimizer, 1e-4, plan)
            made.reader.push(data, 1e-4, result)
            took[plan is watched] = time.process_time() - began
        yield took[True], took[False]


def main() -> None:
    torch.set_num_threads(1)
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with_watch, without = zip(*list(pairs(num + NUM_WARM_UP))[NUM_WARM_UP:], strict=True)
    ratios = [a / b for a, b in zip(with_watch, without, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    ms = [statistics.median(times) * 1e3 for times in (with_watch, without)]
    print(f"{num} pairs: {ms[0]:.1f} ms with, {ms[1]:.1f} ms without; ", end="")
    print(f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
