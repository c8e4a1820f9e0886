"""What the engine reads: batches from a source, gathered into the micro-batches of one step."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_check.models.loss import IGNORED


class Batch(Protocol):
    """int64 [B, T] on the CPU; targets[b, t] is the token after inputs[b, t]."""

    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...


class BatchSource(Protocol):
    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Endless batches from number `start` on, in a fixed order; closing it ends its threads."""
        ...


@dataclass(frozen=True)
class StepData:
    """Everything one optimizer step trains on, on the device."""

    step: int
    micro_batches: list[tuple[Tensor, Tensor]]
    num_positions: int
    """Tokens read."""
    num_targets: int
    """Tokens that count in the loss: the loss is their mean, however micro-batches divide them."""


def gather(
    stream: Iterator[Batch], step: int, num_micro_batches: int, device: torch.device
) -> StepData:
    batches = [next(stream) for _ in range(num_micro_batches)]
    return StepData(
        step=step,
        micro_batches=[
            (b.inputs.to(device, non_blocking=True), b.targets.to(device, non_blocking=True))
            for b in batches
        ],
        num_positions=sum(b.inputs.numel() for b in batches),
        # Counted where the batch lies, on the CPU: no wait for the device.
        num_targets=sum(int((b.targets != IGNORED).sum()) for b in batches),
    )
