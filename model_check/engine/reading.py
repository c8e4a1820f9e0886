"""The one place where the host waits for a step's numbers: a step late on a GPU, so that the GPU
always has work."""

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_check.engine.batches import StepData
from model_check.engine.busy import GpuMoment, Moment, moment
from model_check.engine.distributed.world import ALONE, World
from model_check.engine.fingerprints import Prints
from model_check.engine.step import Own, StepResult


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
    details: Tensor | None = None
    """On the host: see Watch.details."""
    gates: Tensor | None = None
    """On the host: see StepResult.gates."""
    prints: Prints | None = None
    """On the host."""
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
    trains alone), bad ranks (none there), details"""
    gates: Tensor | None
    prints: Prints | None
    own: Own | None
    done: Moment
    """After it they are there."""

    def read(self, world: World) -> StepMetrics:
        if isinstance(self.done, GpuMoment):
            world.wait_for_event(self.done.event)
        num_ranks = 0 if self.own is None else len(self.own.bad_ranks)
        sizes = [_NUM_SCALARS, num_ranks, len(self.values) - _NUM_SCALARS - num_ranks]
        scalars, of_ranks, details = torch.split(self.values, sizes)
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
            details=details,
            gates=self.gates,
            prints=self.prints,
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


class Reader:
    """`lag`: how many steps may be under way while it waits for an earlier one."""

    def __init__(self, lag: int, world: World = ALONE) -> None:
        self.lag, self._world = lag, world
        self.last: StepMetrics | None = None
        """Of the latest step that was read."""
        self._pending: deque[_Pending] = deque()

    def push(self, data: StepData, lr: float, result: StepResult) -> list[StepMetrics]:
        """Take a step that was just enqueued; the metrics that are due now, oldest first."""
        self._pending.append(_start_copy(data, lr, result))
        return self._read(keep=self.lag)

    def flush(self) -> list[StepMetrics]:
        """Those of all steps that are still pending."""
        return self._read(keep=0)

    def _read(self, keep: int) -> list[StepMetrics]:
        num_due = max(0, len(self._pending) - keep)
        metrics = [self._pending.popleft().read(self._world) for _ in range(num_due)]
        self.last = metrics[-1] if metrics else self.last
        return metrics


def _start_copy(data: StepData, lr: float, result: StepResult) -> _Pending:
    loss, none = result.loss, torch.zeros_like(result.loss)
    own_loss = None if result.own is None else result.own.loss
    optional = (none if t is None else t for t in (result.overflow, result.loss_scale, own_loss))
    scalars = [t.to(loss) for t in (loss, result.grad_norm, result.bad, *optional)]
    bad_ranks = [] if result.own is None else [result.own.bad_ranks.to(loss)]
    details = [] if result.details is None else [result.details.to(loss)]
    values = torch.cat([torch.stack(scalars), *bad_ranks, *details])
    gates, prints = result.gates, result.prints
    if values.device.type != "cuda":
        return _Pending(data, lr, values, gates, prints, result.own, moment(values.device))
    values = _on_host(values)
    gates = None if gates is None else _on_host(gates)
    if prints is not None:
        prints = replace(prints, values=_on_host(prints.values))
    done = moment(result.loss.device, awaited=True)
    return _Pending(data, lr, values, gates, prints, result.own, done)


def _on_host(values: Tensor) -> Tensor:
    """Its values are on their way."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
