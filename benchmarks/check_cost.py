"""What do the checks of a step cost? `python -m benchmarks.check_cost [--rounds N] [--threads N]`.

One process trains steps of the `cpu` preset in turns: plain, with the watch for NaN and Inf, with
the watch and all fingerprints; in random order within each round, and compares each round's times:
those of the clock, and the CPU time of all threads.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import Mock

import torch

from model_check.config.load import Request, load
from model_check.engine.assembly import build_trainer
from model_check.engine.results import AsyncMetrics, StepData
from model_check.engine.training_run import TrainingRun
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.checksums import Checksums
from model_check.hooks.fingerprints import Fingerprints
from model_check.hooks.hook import Hook
from model_check.hooks.site_monitor import SiteMonitor
from model_check.train import StepContext, gather, train_step
from tests.engine.conftest import FakeSource, Kept, bare_context

VOCABULARY = 8192
NUM_WARM_UP = 3


def trainer() -> TrainingRun:
    overrides = (f"model.vocab_size={VOCABULARY}", "training.max_steps=100000")
    settings = load(Request(preset="cpu", overrides=overrides), lambda: False).settings
    source = FakeSource(settings.training.batch_size, settings.training.context_length)
    return build_trainer(settings, source, VOCABULARY, bare_context(Kept()))


class Checks(NamedTuple):
    """Of one way to train a step."""

    context: StepContext
    fingerprints: Fingerprints
    log: ChecksumLog | None

    def hooks(self) -> list[Hook]:
        """What takes fingerprints; nothing here finds a state changed."""
        log = ChecksumLog() if self.log is None else self.log
        return [Checksums(self.fingerprints, log, Mock())]


def ways(made: TrainingRun) -> dict[str, Checks]:
    model, optimizer, whole = made.state.model, made.state.optimizer, made.trainer.context
    full = whole.update_watcher
    assert isinstance(full, Fingerprints)
    off = Fingerprints(
        model,
        optimizer,
        full._fingerprint,
        sites=model.sites,
        last_step=-1,
        budget_bytes=0.0,
    )
    plain = replace(whole, watchers=(), update_watcher=off)
    return {
        "plain": Checks(plain, off, None),
        "watch": Checks(replace(plain, watchers=(SiteMonitor(model.sites),)), off, None),
        "watch and fingerprints": Checks(whole, full, ChecksumLog()),
    }


def rounds(num: int) -> Iterator[dict[str, tuple[float, float]]]:
    """Each way -> seconds by the clock, and of CPU, of the second of two steps."""
    made = trainer()
    training = made.state.settings.training
    source = FakeSource(training.batch_size, training.context_length)
    data = gather(source.batches(), 0, 1, made.trainer.context.device)
    each = ways(made)
    for _ in range(num):
        took = {}
        for name in random.sample(list(each), len(each)):
            way = each[name]
            if way.log is not None:  # the other ways have changed the state since
                way.log.begin(way.fingerprints.of_state_now())
            step(data, way)
            began, cpu = time.perf_counter(), time.process_time()
            step(data, way)
            took[name] = time.perf_counter() - began, time.process_time() - cpu
        yield took


def step(data: StepData, way: Checks) -> None:
    hooks = way.hooks()
    result = train_step(way.context, data, 1e-4, hooks)
    for metrics in AsyncMetrics(0).push(data, 1e-4, result):
        if way.log is not None:
            hooks[0].on_result(metrics)
            assert way.log.roll_ups
            assert way.log.check() is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = list(rounds(arguments.rounds + NUM_WARM_UP))[NUM_WARM_UP:]
    print(f"{arguments.rounds} rounds, {arguments.threads} threads; times those of a plain step:")
    for name in ("watch", "watch and fingerprints"):
        for number, clock in enumerate(("clock", "CPU")):
            ratios = [took[name][number] / took["plain"][number] for took in found]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ms = statistics.median(took[name][number] for took in found) * 1e3
            print(f"{name}, {clock}: {middle:.3f} (quartiles {low:.3f} to {high:.3f}), {ms:.1f} ms")


if __name__ == "__main__":
    main()
