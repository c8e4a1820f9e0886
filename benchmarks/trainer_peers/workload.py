"""The workload that all trainers of the comparison train: geometry, tokens, first weights, and the
protocol by which the driver lets one of them step while the others wait."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPS = 1e-8
MAX_GRAD_NORM = 1.0
INIT_STD = 0.02
NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Workload:
    """Sizes: V vocabulary, T context, B sequences in a micro-batch."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    context_length: int
    batch_size: int
    num_micro_batches: int
    num_threads: int

    @property
    def tokens_per_step(self) -> int:
        return self.context_length * self.batch_size * self.num_micro_batches

    def tokens(self, num_steps: int) -> Tensor:
        """int64 [sequences, T], in training order: random words whose followers are not quite
        random, so that there is something to learn."""
        generator = torch.Generator().manual_seed(1)
        count = num_steps * self.num_micro_batches * self.batch_size
        shape = (count, self.context_length)
        words = torch.randint(0, self.vocab_size, shape, generator=generator)
        words[:, 1::2] = (words[:, ::2] * 7 + 1) % self.vocab_size
        return words

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "Workload":
        return Workload(**json.loads(text))


@dataclass(frozen=True)
class Part:
    """The results of one round of one trainer."""

    wall_s: float
    cpu_s: float
    losses: list[float]
    peak_bytes: int
    """Peak of the process so far."""
    before_bytes: int
    """Resident before model and data were built: the imports."""


class Turn:
    """A trainer's side of the protocol: steps only while it has the turn.

    The driver writes a line with a number of steps; after so many this writes a Part. Call
    `begin_step` before each step and `end_step` after it; `begin_step` is False at the end.
    """

    def __init__(self) -> None:
        self._answers = sys.stdout
        sys.stdout = sys.stderr  # what libraries print must not pass for an answer
        self._before_bytes = _status_bytes("VmRSS:")
        self._left = 0
        self._losses: list[Callable[[], float]] = []
        self._wall_s = self._cpu_s = 0.0

    def begin_step(self) -> bool:
        if self._left == 0:
            line = sys.stdin.readline()
            if not line.strip():
                return False
            self._left = int(line)
            self._losses = []
            self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return True

    def end_step(self, loss: Callable[[], float]) -> None:
        """`loss` is called after the clock has stopped."""
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            part = Part(
                wall_s=time.perf_counter() - self._wall_s,
                cpu_s=time.process_time() - self._cpu_s,
                losses=[loss() for loss in self._losses],
                peak_bytes=_status_bytes("VmHWM:"),
                before_bytes=self._before_bytes,
            )
            print(json.dumps(asdict(part)), file=self._answers, flush=True)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
