"""One rank of a job, or its like that trains alone, as a program: the plan is the only argument.
Leaves what each step told, and the weights, in PLAN["out"].RANK.pt."""

import itertools
import json
import os
import sys
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_check.config.ranks import rank_timeout_s
from model_check.dist.job import joined
from model_check.dist.world import World
from model_check.engine.assembly import build_trainer
from model_check.engine.run_context import Channels
from model_check.events import Evaluation
from model_check.forensics.shard import is_shared
from model_check.model import IGNORED
from model_check.utils.worker_env import RankEnv
from tests.engine.conftest import (
    VOCABULARY,
    FakeBatch,
    FakeSource,
    Kept,
    bare_context,
    make_settings,
    trace_alone,
)

NUM_SEQUENCES = 16


class Shared(FakeSource):
    """The batches of one rank; sequence n has n % 5 labels fewer than the others."""

    def __init__(self, batch_size: int, length: int, world: World) -> None:
        super().__init__(batch_size, length)
        self._world = world

    def batches(self, start: int = 0) -> Generator[FakeBatch, None, None]:
        first = start + self._world.rank * self.batch_size
        for number in itertools.count(first, self._world.size * self.batch_size):
            batch = self.at(number % NUM_SEQUENCES)  # it can learn these by heart
            targets = batch.targets.clone()
            for row in range(self.batch_size):
                targets[row, : (number + row) % 5] = IGNORED
            yield FakeBatch(batch.inputs, targets)


def validation(world: World) -> list[FakeBatch]:
    """Five batches, divided among the ranks: not each has as many."""
    source = FakeSource(batch_size=2)
    return [source.random(number) for number in range(world.rank, 5, world.size)]


def whole(parameter: Tensor) -> Tensor:
    """Of a sharded model: gathered, which all ranks ask for."""
    shared: Any = parameter.detach()
    return shared.full_tensor() if is_shared(shared) else shared


def main(plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, plan["dtype"]))
    if plan["traced"]:
        trace_alone(setattr)
    settings = make_settings(**plan["changes"])
    kept = Kept()
    limit = partial(rank_timeout_s, settings.launch, False)
    with joined(
        RankEnv.from_environ(os.environ), torch.device("cpu"), limit, settings.launch
    ) as world:
        training = settings.training
        source = Shared(training.batch_size, training.context_length, world)
        splits = {"val": partial(validation, world)} if training.eval_interval else {}
        context = replace(
            bare_context(kept, Path(plan["out"]).parent / "checkpoints"),
            world=world,
            splits=splits,
            channels=Channels(kept.say, kept, is_quiet=not world.is_first),
        )
        trainer = build_trainer(settings, source, VOCABULARY, context)
        trainer.run()
        found = {
            "losses": [float.fromhex(step.loss) for step in kept.steps()],
            "norms": [float.fromhex(step.grad_norm) for step in kept.steps()],
            "own": [step.own_loss for step in kept.steps()],
            "tokens": [step.tokens for step in kept.steps()],
            "prints": [step.fp for step in kept.steps()],
            "repeated": [step.repeated for step in kept.steps()],
            "lines": kept.lines,
            "evaluations": [e.loss for e in kept.events if isinstance(e, Evaluation)],
            "weights": {n: whole(p) for n, p in trainer.state.model.named_parameters()},
        }
        torch.save(found, f"{plan['out']}.{world.rank}.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
