"""What it costs to watch a step: compares our step with the same step without the non-finite gate,
the reading, event and line. Both run in turns within one process; the order changes each pair.

Prints one JSON line, in milliseconds of CPU. Arguments: workload, number of pairs.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from ours import CPU, TokenSource, build
from torch.nn.utils import get_total_norm
from workload import LEARNING_RATE, MAX_GRAD_NORM, Workload

from model_check.engine.busy import moment
from model_check.engine.results import AsyncMetrics, StepData, StepMetrics
from model_check.engine.training_run import TrainingRun
from model_check.hooks.hook import RunObserver
from model_check.optim import clip_divisor
from model_check.train import accumulate, gather, train_step

WARM_UP_PAIRS = 3
DIRECT_ROUNDS = 300


class Watching:
    """One trainer; the caller takes its steps one by one."""

    def __init__(self, work: Workload, num_pairs: int) -> None:
        num_steps = 2 * (num_pairs + WARM_UP_PAIRS) + 1
        self.run: TrainingRun = build(work, num_steps, RunObserver())
        self.context, self.hooks = self.run.trainer.context, self.run.trainer.hooks
        self.work, self._metrics = work, AsyncMetrics(0)
        self._stream = TokenSource(work.tokens(num_steps), work.batch_size).batches()
        self.run.state.context.meter.start(moment(CPU))

    def data(self) -> StepData:
        return gather(self._stream, 0, self.work.num_micro_batches, CPU)

    def watched(self) -> None:
        """The part of a step that Trainer does."""
        data = self.data()
        result = train_step(self.context, data, LEARNING_RATE, self.hooks)
        self.take(self._metrics.push(data, LEARNING_RATE, result))

    def take(self, readings: list[StepMetrics]) -> None:
        for reading in readings:
            self.run.state.context.meter.finish_step(
                reading.loss, reading.data.num_positions, reading.done
            )
            for observer in self.run.state.observers:
                observer.on_result(reading)

    def bare(self) -> None:
        data, optimizer = self.data(), self.context.optimizer
        accumulate(self.context, data)
        divisor = clip_divisor(get_total_norm(optimizer.gradients()), MAX_GRAD_NORM)
        with torch.no_grad():
            optimizer.num_steps += 1
            for block in optimizer.blocks:
                optimizer._update(
                    block, block.gradients(), LEARNING_RATE, divisor, optimizer.refusing
                )

    def pair(self, number: int) -> tuple[float, float]:
        """CPU milliseconds of a watched and of a bare step."""
        if number % 2:
            return cpu_ms(self.watched), cpu_ms(self.bare)
        bare = cpu_ms(self.bare)
        return cpu_ms(self.watched), bare

    def direct(self) -> float:
        """CPU milliseconds of the gate, the reading, the event and the line by themselves."""
        data = self.data()
        result = train_step(self.context, data, LEARNING_RATE, self.hooks)

        def watch() -> None:
            _ = ~(torch.isfinite(result.loss) & torch.isfinite(result.grad_norm))
            self.take(self._metrics.push(data, LEARNING_RATE, result))

        return cpu_ms(lambda: [watch() for _ in range(DIRECT_ROUNDS)]) / DIRECT_ROUNDS


def cpu_ms(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return 1000 * (time.process_time() - started)


def main(work: Workload, num_pairs: int) -> None:
    steps = Watching(work, num_pairs)
    pairs = [steps.pair(number) for number in range(WARM_UP_PAIRS + num_pairs)][WARM_UP_PAIRS:]
    print(json.dumps({"pairs": pairs, "direct_ms": steps.direct()}))


if __name__ == "__main__":
    main(Workload.parse(sys.argv[1]), int(sys.argv[2]))
