"""Batches from a source, gathered into the micro-batches of one step."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model_check.data.read.loader import Batch
from model_check.engine.busy import Busy
from model_check.engine.distributed.world import ALONE, World, refuse_repeat
from model_check.model import IGNORED

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
    """What the model is called with: inputs, targets and, where they are masked, documents. Those
    of this rank."""
    num_positions: int
    """Tokens read, by all ranks."""
    num_targets: int
    """Tokens that count in the loss, of all ranks: the loss is their mean, however micro-batches
    divide them."""
    wait_s: float = 0.0
    """How long the step waited for its batches, seconds."""
    wait_for_ranks_s: float = 0.0
    """How long for other ranks."""
    asked_to_end: bool = False
    """A rank was asked to end: unless this is the first step, no rank trains on these."""
    busy: Busy = field(default_factory=Busy, compare=False)
    """What it keeps the device busy from now on."""


def gather(
    stream: Iterator[Batch],
    step: int,
    num_micro_batches: int,
    device: torch.device,
    world: World = ALONE,
    *,
    is_asked_to_end: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> StepData:
    """The ranks tell each other what they count, and whether they were asked to end. `meanwhile` is
    called while one waits long for another. Raises PeerLost."""
    started = time.perf_counter()
    batches = [next(stream) for _ in range(num_micro_batches)]
    read = time.perf_counter()
    # Counted where the batch lies, on the CPU: no wait for the device.
    counts = (
        sum(b.inputs.numel() for b in batches),
        sum(int((b.targets != IGNORED).sum()) for b in batches),
        int(is_asked_to_end),
    )
    offer = world.offer(*counts)
    micro_batches = [on_device(batch, device) for batch in batches]
    offered = time.perf_counter()
    told = offer.take(meanwhile)
    refuse_repeat(told)
    num_positions, num_targets, num_asked = map(sum, zip(*told, strict=True))
    return StepData(
        step=step,
        micro_batches=micro_batches,
        num_positions=num_positions,
        num_targets=num_targets,
        wait_s=read - started,
        wait_for_ranks_s=time.perf_counter() - offered,
        asked_to_end=num_asked > 0,
        busy=Busy(device),
    )


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    """The arguments of the model's forward pass."""
    tensors = (batch.inputs, batch.targets, batch.documents)
    return tuple(t.to(device, non_blocking=True) for t in tensors if t is not None)
