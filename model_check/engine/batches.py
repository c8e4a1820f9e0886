"""Batches from a source, gathered into the micro-batches of one step."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model_check.data.read.loader import Batch
from model_check.engine.busy import Busy
from model_check.models.loss import IGNORED

Splits = Mapping[str, Callable[[], Iterable[Batch]]]
"""Name -> its batches, from the first; the last may be smaller."""


class BatchSource(Protocol):
    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Endless batches from sequence `start` on, in a fixed order. Closing the generator ends
        its threads."""


@dataclass(frozen=True)
class StepData:
    """Everything one optimizer step trains on, on the device."""

    step: int
    micro_batches: list[tuple[Tensor, ...]]
    """What the model is called with: inputs, targets and, where they are masked, documents."""
    num_positions: int
    """Tokens read."""
    num_targets: int
    """Tokens that count in the loss: the loss is their mean, however micro-batches divide them."""
    wait_s: float = 0.0
    """How long the step waited for its batches, seconds."""
    busy: Busy = field(default_factory=Busy, compare=False)
    """What it keeps the device busy from now on."""


def gather(
    stream: Iterator[Batch], step: int, num_micro_batches: int, device: torch.device
) -> StepData:
    started = time.perf_counter()
    batches = [next(stream) for _ in range(num_micro_batches)]
    wait_s = time.perf_counter() - started
    return StepData(
        step=step,
        micro_batches=[on_device(batch, device) for batch in batches],
        num_positions=sum(b.inputs.numel() for b in batches),
        # Counted where the batch lies, on the CPU: no wait for the device.
        num_targets=sum(int((b.targets != IGNORED).sum()) for b in batches),
        wait_s=wait_s,
        busy=Busy(device),
    )


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    """The arguments of the model's forward pass."""
    tensors = (batch.inputs, batch.targets, batch.documents)
    return tuple(t.to(device, non_blocking=True) for t in tensors if t is not None)
