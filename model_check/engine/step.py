"""One optimizer step. Its numbers stay on the device: the caller decides when to wait for them."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from model_check.engine.batches import StepData
from model_check.engine.optim import AdamW, clip_divisor
from model_check.engine.precision import autocast


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device."""

    loss: Tensor
    """Mean over the step's targets."""
    grad_norm: Tensor
    """Before clipping."""
    bad: Tensor
    """Whether loss or norm is not finite; no weight has changed then."""


@dataclass(frozen=True)
class StepPlan:
    """What does not change from step to step."""

    device: torch.device
    dtype: torch.dtype
    max_grad_norm: float | None

    def forward_context(self) -> AbstractContextManager[object]:
        return autocast(self.device, self.dtype)


def train_step(
    model: nn.Module, data: StepData, optimizer: AdamW, lr: float, plan: StepPlan
) -> StepResult:
    """One update over all micro-batches, without a host sync. A non-finite step leaves every weight
    as it was."""
    loss = accumulate(model, data, optimizer, plan)
    grad_norm = get_total_norm(optimizer.gradients())
    bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
    optimizer.step(lr, bad, clip_divisor(grad_norm, plan.max_grad_norm))
    return StepResult(loss, grad_norm, bad)


def accumulate(model: nn.Module, data: StepData, optimizer: AdamW, plan: StepPlan) -> Tensor:
    """Fill `.grad` with the gradients of the step's mean loss and return that loss."""
    optimizer.zero_grad()
    losses = [backward(model, *pair, data, plan) for pair in data.micro_batches]
    return torch.stack(losses).sum()


def backward(
    model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, data: StepData, plan: StepPlan
) -> Tensor:
    """Add one micro-batch's gradients; its share of the step's mean loss."""
    with plan.forward_context():
        loss: Tensor = model(inputs_BT, targets_BT) / max(1, data.num_targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
