"""One optimizer step. Its numbers stay on the device; the caller decides when to wait for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_check.engine.batches import StepData
from model_check.engine.busy import Waited
from model_check.engine.distributed.world import ALONE, World
from model_check.engine.fingerprints import Fingerprints, Prints
from model_check.engine.loss_scale import LossScale
from model_check.engine.optim import AdamW, clip_divisor, total_norm
from model_check.engine.watch import Watch
from model_check.model import Llama, Observer


@dataclass(frozen=True)
class StepResult:
    """On the device, scalars where no shape is given. On all ranks of a job they are the same, but
    for `details` and `own`."""

    loss: Tensor
    """Mean over the step's targets."""
    grad_norm: Tensor
    """Before clipping."""
    bad: Tensor
    """Whether loss or norm is not finite; no weight has changed then."""
    overflow: Tensor | None = None
    """Whether gradients are not finite in float16, the loss being finite; no weight has changed
    then, and `overflow` decides whether a smaller scale helps."""
    loss_scale: Tensor | None = None
    """The scale of this step; both are None where none is used."""
    details: Tensor | None = None
    """Only an alarm reads them: see Watch.details."""
    gates: Tensor | None = None
    """[layers, query heads]: those that the update left; None: the model has none."""
    prints: Prints | None = None
    own: "Own | None" = None
    """None: it trains alone."""


@dataclass(frozen=True)
class Own:
    """What one rank brings into a step of the job: scalars on the device."""

    loss: Tensor
    """Its share of the mean loss."""
    bad_ranks: Tensor
    """[ranks], the same on all: 1 where a rank's share, or one of its gradients before they were
    summed, is not finite."""
    waited: Waited | None
    """For the other ranks."""


@dataclass(frozen=True)
class StepPlan:
    """What does not change from step to step."""

    device: torch.device
    dtype: torch.dtype
    max_grad_norm: float | None
    watch: Watch
    fingerprints: Fingerprints
    world: World = ALONE

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who sees what flows between blocks."""
        return self.watch.see, self.fingerprints.see

    def forward_context(self) -> AbstractContextManager[object]:
        """Autocast, which casts each weight once until it ends: none may change inside."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def train_step(
    model: Llama, data: StepData, optimizer: AdamW, lr: float, plan: StepPlan
) -> StepResult:
    """One update over all micro-batches, without a host sync. A non-finite step leaves every weight
    as it was."""
    loss, own = summed(accumulate(model, data, optimizer, plan), plan)
    if optimizer.loss_scale is not None:
        result = _scaled_update(loss, optimizer, optimizer.loss_scale, lr, plan)
        return replace(result, own=own)
    plan.fingerprints.begin_update()
    grad_norms = optimizer.grad_norms()
    grad_norm = total_norm(grad_norms)
    bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
    divisor = clip_divisor(grad_norm, plan.max_grad_norm)
    optimizer.step(lr, bad, divisor, looker=plan.fingerprints)
    prints = plan.fingerprints.end_update(grad_norms)
    return StepResult(
        loss,
        grad_norm,
        bad,
        details=plan.watch.details(grad_norms),
        gates=optimizer.gates(),
        prints=prints,
        own=own,
    )


def _scaled_update(
    loss: Tensor, optimizer: AdamW, scale: LossScale, lr: float, plan: StepPlan
) -> StepResult:
    """For float16: gradients carry the loss scale. Where they overflow, nothing changes."""
    used = scale.value.clone()
    plan.fingerprints.begin_update()
    grad_norms = optimizer.grad_norms()
    grad_norm = total_norm(grad_norms) / used
    overflow = ~torch.isfinite(grad_norm)
    bad = ~torch.isfinite(loss) | scale.exhausted(overflow)
    divisor = clip_divisor(grad_norm, plan.max_grad_norm)
    divisor = used if divisor is None else used * divisor
    optimizer.step(lr, bad, divisor, skip=overflow, looker=plan.fingerprints)
    scale.count(~overflow & (optimizer.refusing == 0))
    return StepResult(
        loss,
        grad_norm,
        bad,
        overflow=overflow & ~bad,
        loss_scale=used,
        details=plan.watch.details(grad_norms),
        gates=optimizer.gates(),
        prints=plan.fingerprints.end_update(grad_norms),
    )


def summed(own_loss: Tensor, plan: StepPlan) -> tuple[Tensor, Own | None]:
    """The loss of all ranks, and what this one brought in. One sum tells both: a rank that asked
    the others only after a failure would wait for ranks that saw none."""
    world = plan.world
    own_bad = world.own_bad()
    if own_bad is None:
        return own_loss, None
    told = own_loss.new_zeros(1 + world.size)
    told[0] = own_loss
    told[1 + world.rank] = own_bad | ~torch.isfinite(own_loss)
    world.summed(told)
    return told[0], Own(own_loss, told[1:], world.waited)


def accumulate(model: Llama, data: StepData, optimizer: AdamW, plan: StepPlan) -> Tensor:
    """Fill `.grad` with the gradients of the step's mean loss (times the loss scale, where there is
    one), those of all ranks; return this rank's share of that loss."""
    optimizer.zero_grad()
    plan.watch.begin()
    plan.fingerprints.begin(data.step)
    summed_loss, losses = plan.world.summed_loss(model), []
    with plan.forward_context():  # one for all micro-batches: the weights are cast once a step
        for number, pair in enumerate(data.micro_batches, start=1):
            with plan.world.reducing(number == len(data.micro_batches)):
                losses.append(backward(summed_loss, pair, data, optimizer, plan))
    return torch.stack(losses).sum()


def backward(
    summed_loss: Callable[..., Tensor],
    micro_batch: tuple[Tensor, ...],
    data: StepData,
    optimizer: AdamW,
    plan: StepPlan,
) -> Tensor:
    """Add one micro-batch's gradients; its share of the step's mean loss. `summed_loss`: that of
    the model, see `World.summed_loss`."""
    num_targets, scale = max(1, data.num_targets), optimizer.loss_scale
    unscaled = torch.ones((), device=plan.device) if scale is None else scale.value
    grad_scale = unscaled / num_targets
    total = summed_loss(*micro_batch, grad_scale=grad_scale, observers=plan.observers)
    # Within the forward context: the products have their dtypes already.
    with torch.autocast(plan.device.type, enabled=False):
        (total * grad_scale).backward()  # type: ignore[no-untyped-call]
    plan.watch.end_micro_batch()
    plan.fingerprints.end_micro_batch()
    loss: Tensor = total.detach() / num_targets
    return loss
