"""A step's data and its numbers. The one place where the host waits for these: a step late on a
GPU, so that the GPU always has work."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_check.engine.busy import Busy, GpuMoment, Moment, Waited, moment
from model_check.engine.distributed.world import ALONE, World


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


@dataclass(frozen=True)
class StepMetrics:
    """A finished step's numbers, on the host."""

    data: StepData
    lr: float
    loss: float
    grad_norm: float
    bad: bool
    done: Moment
    """When its work was."""
    overflow: bool = False
    """Gradients are not finite in float16, and no weight has changed."""
    loss_scale: float | None = None
    grad_norms: Tensor | None = None
    notes: dict[str, Tensor] = field(default_factory=dict)
    own_loss: float | None = None
    """This rank's share of the loss; None: it trains alone."""
    bad_ranks: tuple[int, ...] = ()
    """Those on which what is not finite began, as far as each one's own numbers tell."""
    wait_ms: float | None = None
    """How long this rank waited for the others; None: it trains alone."""

    @property
    def step(self) -> int:
        return self.data.step

    @property
    def busy_ms(self) -> float | None:
        return self.data.busy.ms


_NUM_SCALARS = 6


@dataclass(frozen=True)
class _Pending:
    """A step whose numbers are on their way to the host."""

    data: StepData
    lr: float
    values: Tensor
    """loss, grad_norm, bad, overflow and loss scale (0 and 0 without one), own loss (0 where it
    trains alone), bad ranks (none there), grad_norms"""
    notes: dict[str, Tensor]
    own: OwnShare | None
    done: Moment
    """After it they are there."""

    def read(self, world: World) -> StepMetrics:
        if isinstance(self.done, GpuMoment):
            world.wait_for_event(self.done.event)
        num_ranks = 0 if self.own is None else len(self.own.bad_ranks)
        sizes = [_NUM_SCALARS, num_ranks, len(self.values) - _NUM_SCALARS - num_ranks]
        scalars, of_ranks, grad_norms = torch.split(self.values, sizes)
        loss, grad_norm, bad, overflow, loss_scale, own_loss = scalars.tolist()
        return StepMetrics(
            self.data,
            self.lr,
            loss,
            grad_norm,
            bad=bool(bad),
            done=self.done,
            overflow=bool(overflow),
            loss_scale=loss_scale or None,
            grad_norms=grad_norms,
            notes=self.notes,
            own_loss=None if self.own is None else own_loss,
            bad_ranks=tuple(of_ranks.nonzero().flatten().tolist()),
            wait_ms=self._wait_ms,
        )

    @property
    def _wait_ms(self) -> float | None:
        if self.own is None:
            return None
        of_sum = 0.0 if self.own.waited is None else self.own.waited.ms
        return self.data.wait_for_ranks_s * 1000 + of_sum


class AsyncMetrics:
    """`lag`: how many steps may be under way while the host waits for an earlier one."""

    def __init__(self, lag: int, world: World = ALONE) -> None:
        self.lag, self._world = lag, world
        self._pending: deque[_Pending] = deque()

    def push(self, data: StepData, lr: float, result: StepResult) -> list[StepMetrics]:
        """Take a step that was just enqueued; returns the metrics that are due now, oldest
        first."""
        self._pending.append(_start_copy(data, lr, result))
        return self._read(keep=self.lag)

    def flush(self) -> list[StepMetrics]:
        """Returns those of all steps that are still pending."""
        return self._read(keep=0)

    def _read(self, keep: int) -> list[StepMetrics]:
        num_due = max(0, len(self._pending) - keep)
        return [self._pending.popleft().read(self._world) for _ in range(num_due)]


def _start_copy(data: StepData, lr: float, result: StepResult) -> _Pending:
    loss, none = result.loss, torch.zeros_like(result.loss)
    own_loss = None if result.own is None else result.own.loss
    optional = (none if t is None else t for t in (result.overflow, result.loss_scale, own_loss))
    scalars = [t.to(loss) for t in (loss, result.grad_norm, result.bad, *optional)]
    bad_ranks = [] if result.own is None else [result.own.bad_ranks.to(loss)]
    values = torch.cat([torch.stack(scalars), *bad_ranks, result.grad_norms.to(loss)])
    notes = result.notes
    if values.device.type != "cuda":
        return _Pending(data, lr, values, notes, result.own, moment(values.device))
    values = _on_host(values)
    notes = {name: _on_host(note) for name, note in notes.items()}
    done = moment(result.loss.device, awaited=True)
    return _Pending(data, lr, values, notes, result.own, done)


def _on_host(values: Tensor) -> Tensor:
    """Its values are on their way."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
