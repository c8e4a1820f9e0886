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

import torch
from torch import Tensor

from model_check.config.load import Request, load
from model_check.engine.assembly import build_trainer
from model_check.engine.batches import StepData, gather
from model_check.engine.fingerprint_log import FingerprintLog
from model_check.engine.fingerprints import Fingerprints
from model_check.engine.step import StepPlan, train_step
from model_check.engine.trainer import Trainer
from model_check.engine.watch import Watch
from tests.engine.conftest import FakeSource, Kept, bare_context

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
    source = FakeSource(settings.training.batch_size, settings.training.context_length)
    return build_trainer(settings, source, VOCABULARY, bare_context(Kept()))


class Checks(NamedTuple):
    """Of one way to train a step."""

    plan: StepPlan
    log: FingerprintLog | None


def ways(made: Trainer) -> dict[str, Checks]:
    model, optimizer, whole = made.state.model, made.state.optimizer, made.plan
    kernel = whole.fingerprints._fingerprint
    off = Fingerprints(model, optimizer, kernel, last_step=-1, budget_bytes=0.0)
    plain = replace(whole, watch=NoWatch(model), fingerprints=off)
    return {
        "plain": Checks(plain, None),
        "watch": Checks(replace(whole, fingerprints=off), None),
        "watch and fingerprints": Checks(whole, FingerprintLog()),
    }


def rounds(num: int) -> Iterator[dict[str, tuple[float, float]]]:
    """Each way -> seconds by the clock, and of CPU, of the second of two steps."""
    made = trainer()
    data = gather(made.source.batches(), 0, 1, made.plan.device)
    each = ways(made)
    for _ in range(num):
        took = {}
        for name in random.sample(list(each), len(each)):
            plan, log = each[name]
            if log is not None:  # the other ways have changed the state since
                log.begin(plan.fingerprints.of_state_now())
            step(made, data, plan, log)
            began, cpu = time.perf_counter(), time.process_time()
            step(made, data, plan, log)
            took[name] = time.perf_counter() - began, time.process_time() - cpu
        yield took


def step(made: Trainer, data: StepData, plan: StepPlan, log: FingerprintLog | None) -> None:
    result = train_step(made.state.model, data, made.state.optimizer, 1e-4, plan)
    for metrics in made.reader.push(data, 1e-4, result):
        if log is not None:
            log.take(metrics)
            assert log.roll_ups
            assert log.check() is None


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
