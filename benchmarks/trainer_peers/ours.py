"""Our trainer as in a run: with its process set up, its events and its log."""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from workload import (
    BETAS,
    EPS,
    INIT_STD,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPS,
    ROPE_THETA,
    WEIGHT_DECAY,
    Turn,
    Workload,
)

from model_check.config.schema import LoggingSettings, ModelSettings, Settings, TrainingSettings
from model_check.engine.assembly import build_trainer
from model_check.engine.device import keep_freed_memory, set_up_process
from model_check.engine.metrics import Meter
from model_check.engine.results import StepData, StepMetrics
from model_check.engine.run_context import Channels, Claim, Identity, RunContext
from model_check.engine.stop import StopSignal
from model_check.engine.training_run import TrainingRun
from model_check.events import EventSink
from model_check.hooks.hook import RunObserver
from model_check.model import IGNORED

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TokenBatch:
    inputs: Tensor
    targets: Tensor
    documents: None = None


@dataclass(frozen=True)
class TokenSource:
    """The workload's tokens; the last position of a sequence has no label, as in transformers."""

    tokens: Tensor
    batch_size: int

    def batches(self, start: int = 0) -> Generator[TokenBatch, None, None]:
        for inputs in self.tokens[start:].split(self.batch_size):
            targets = torch.cat((inputs[:, 1:], torch.full_like(inputs[:, :1], IGNORED)), dim=1)
            yield TokenBatch(inputs, targets)


class Pace(RunObserver):
    """Makes the trainer wait until it is its turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def before_step(self, _data: StepData) -> None:
        if not self._turn.begin_step():
            raise SystemExit(0)

    def on_result(self, reading: StepMetrics) -> None:
        self._turn.end_step(lambda: reading.loss)


def settings_of(work: Workload, num_steps: int) -> Settings:
    return Settings(
        model=ModelSettings(
            num_layers=work.num_layers,
            hidden_size=work.hidden_size,
            intermediate_size=work.intermediate_size,
            num_heads=work.num_heads,
            num_kv_heads=work.num_kv_heads,
            vocab_size=work.vocab_size,
            rope_theta=ROPE_THETA,
            rope_scaling=None,
            rms_norm_eps=NORM_EPS,
            init_std=INIT_STD,
            attention_backend="sdpa",
        ),
        training=TrainingSettings(
            max_steps=num_steps,
            batch_size=work.batch_size,
            grad_accum_nums=work.num_micro_batches,
            context_length=work.context_length,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            use_amp=False,
        ),
        logging=LoggingSettings(log_interval=1),
    )


def build(work: Workload, num_steps: int, observer: RunObserver) -> TrainingRun:
    source = TokenSource(work.tokens(num_steps), work.batch_size)
    return build_from(settings_of(work, num_steps), source, work.vocab_size, observer)


def build_from(
    settings: Settings, source: TokenSource, vocab_size: int, observer: RunObserver
) -> TrainingRun:
    """Runs in a process that is set up as a worker's; a listener reads its events."""
    set_up_process(settings.system, 1, os.environ)
    keep_freed_memory()
    ours, theirs = socket.socketpair()
    subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
    theirs.close()
    sink = EventSink(ours.detach())
    context = RunContext(
        identity=Identity("CPU0"),
        channels=Channels(lambda text: print(text, file=sys.stderr), sink, (observer,)),
        device=CPU,
        claim=Claim(Path()),
        meter=Meter(),
        stop=StopSignal(),
    )
    return build_trainer(settings, source, vocab_size, context)


def main(work: Workload, num_steps: int, weights: Path) -> None:
    turn = Turn()
    trainer = build(work, num_steps, Pace(turn))
    trainer.state.model.load_state_dict(torch.load(weights, weights_only=True))
    trainer.run()


if __name__ == "__main__":
    main(Workload.parse(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
