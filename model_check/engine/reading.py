"""The one place where the host waits for a step's numbers: a step late on a GPU, so that the GPU
always has work."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from model_check.engine.batches import StepData
from model_check.engine.step import StepResult


@dataclass(frozen=True)
class StepMetrics:
    """A finished step's numbers, on the host."""

    data: StepData
    lr: float
    loss: float
    grad_norm: float
    bad: bool
    overflow: bool = False
    """Gradients are not finite in float16, and no weight has changed."""
    loss_scale: float | None = None
    details: Tensor | None = None
    """On the host: see Watch.details."""

    @property
    def step(self) -> int:
        return self.data.step


_Pending = tuple[StepData, float, Tensor, torch.cuda.Event | None]
"""A step, its learning rate, its numbers on their way to the host, and the event after which they
are there (None: they are). The numbers: loss, grad_norm, bad, overflow and loss scale (0 and 0
without one), details."""
_NUM_SCALARS = 5


class Reader:
    """`lag`: how many steps may be under way while it waits for an earlier one."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.last: StepMetrics | None = None
        """Of the latest step that was read."""
        self._pending: deque[_Pending] = deque()

    def push(self, data: StepData, lr: float, result: StepResult) -> list[StepMetrics]:
        """Take a step that was just enqueued; the metrics that are due now, oldest first."""
        self._pending.append((data, lr, *_start_copy(result)))
        return self._read(keep=self.lag)

    def flush(self) -> list[StepMetrics]:
        """Those of all steps that are still pending."""
        return self._read(keep=0)

    def _read(self, keep: int) -> list[StepMetrics]:
        metrics = []
        while len(self._pending) > keep:
            data, lr, values, ready = self._pending.popleft()
            if ready is not None:
                ready.synchronize()  # sync
            loss, grad_norm, bad, overflow, loss_scale = values[:_NUM_SCALARS].tolist()
            flags, details = (bool(bad), bool(overflow)), values[_NUM_SCALARS:]
            metrics.append(
                StepMetrics(data, lr, loss, grad_norm, *flags, loss_scale or None, details)
            )
        self.last = metrics[-1] if metrics else self.last
        return metrics


def _start_copy(result: StepResult) -> tuple[Tensor, torch.cuda.Event | None]:
    loss, none = result.loss, torch.zeros_like(result.loss)
    scaling = (none if t is None else t for t in (result.overflow, result.loss_scale))
    scalars = [t.to(loss) for t in (loss, result.grad_norm, result.bad, *scaling)]
    details = [] if result.details is None else [result.details.to(loss)]
    values = torch.cat([torch.stack(scalars), *details])
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready
