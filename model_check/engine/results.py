"""A step's data and its numbers. The one place where the host waits for these: a step late on a
GPU, so that the GPU always has work."""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from model_check.dist.world import ALONE, World
from model_check.engine.busy import Busy, GpuMoment, Moment, Waited, moment


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
    """A rank was asked to end: unless this is the first step, no rank trains on this data."""
    busy: Busy = field(default_factory=Busy, compare=False)
    """What it keeps the device busy from now on."""


@dataclass(frozen=True)
class OwnShare:
    """What one rank brings into a step of the job: scalars on the device."""

    loss: Tensor
    """Its share of the mean loss."""
    bad_ranks: Tensor
    """[ranks], the same on all: 1 where a rank's share, or one of its gradients before they were
    summed, is not finite."""
    waited: Waited | None
    """For the other ranks."""


@dataclass(frozen=True)
class StepResult:
    """A step's numbers on the device, scalars where no shape is given. On all ranks of a job they
    are the same, but for `own` and `notes`."""

    loss: Tensor
    """Mean over the step's targets."""
    grad_norm: Tensor
    """Before clipping."""
    bad: Tensor
    """Whether loss or norm is not finite; no weight has changed then."""
    grad_norms: Tensor
    """[parameters with a gradient]: the norm of each, in the order of the model."""
    overflow: Tensor | None = None
    """Whether gradients are not finite in float16, the loss being finite; no weight has changed
    then, and `hooks.overflow` decides whether a smaller scale helps."""
    loss_scale: Tensor | None = None
    """The scale of this step; both are None where none is used."""
    own: OwnShare | None = None
    """None: it trains alone."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """What hooks took of the step, by the name of the hook; it comes to the host with the rest."""

    def on_host(self) -> "StepResult":
        """Returns a copy whose values are on their way to the host."""
        values = {name: _on_host(v) for name, v in vars(self).items() if isinstance(v, Tensor)}
        notes = {name: _on_host(note) for name, note in self.notes.items()}
        own = self.own
        if own is not None:
            own = replace(own, loss=_on_host(own.loss), bad_ranks=_on_host(own.bad_ranks))
        return replace(self, **values, notes=notes, own=own)


@dataclass(frozen=True)
class StepMetrics:
    """A finished step's numbers, on the host once `done` is over."""

    data: StepData
    lr: float
    result: StepResult
    done: Moment
    """When its work was."""

    @property
    def step(self) -> int:
        return self.data.step

    @cached_property
    def loss(self) -> float:
        return float(self.result.loss)

    @cached_property
    def grad_norm(self) -> float:
        return float(self.result.grad_norm)

    @property
    def bad(self) -> bool:
        return bool(self.result.bad)

    @property
    def overflow(self) -> bool:
        """Gradients are not finite in float16, and no weight has changed."""
        return self.result.overflow is not None and bool(self.result.overflow)

    @property
    def loss_scale(self) -> float | None:
        return None if self.result.loss_scale is None else float(self.result.loss_scale)

    @property
    def own_loss(self) -> float | None:
        """This rank's share of the loss; None: it trains alone."""
        return None if self.result.own is None else float(self.result.own.loss)

    @property
    def bad_ranks(self) -> list[int]:
        """Those on which what is not finite began, as far as each one's own numbers tell."""
        own = self.result.own
        return [] if own is None else own.bad_ranks.nonzero().flatten().tolist()

    @property
    def wait_ms(self) -> float | None:
        """How long this rank waited for the others; None: it trains alone."""
        if (own := self.result.own) is None:
            return None
        of_sum = 0.0 if own.waited is None else own.waited.ms
        return self.data.wait_for_ranks_s * 1000 + of_sum


class AsyncMetrics:
    """`lag`: how many steps may be under way while the host waits for an earlier one."""

    def __init__(self, lag: int, world: World = ALONE) -> None:
        self.lag, self._world = lag, world
        self._pending: deque[StepMetrics] = deque()

    def push(self, data: StepData, lr: float, result: StepResult) -> list[StepMetrics]:
        """Take a step that was just enqueued; returns the metrics that are due now, oldest
        first."""
        device = result.loss.device
        result = result.on_host() if device.type == "cuda" else result
        self._pending.append(StepMetrics(data, lr, result, moment(device, awaited=True)))
        return self._read(keep=self.lag)

    def flush(self) -> list[StepMetrics]:
        """Returns those of all steps that are still pending."""
        return self._read(keep=0)

    def _read(self, keep: int) -> list[StepMetrics]:
        due = [self._pending.popleft() for _ in range(len(self._pending) - keep)]
        for metrics in due:
            if isinstance(metrics.done, GpuMoment):
                self._world.wait_for_event(metrics.done.event)
        return due


def _on_host(values: Tensor) -> Tensor:
    """Its values are on their way."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
