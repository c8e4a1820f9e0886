"""Where the first NaN or Inf of a step was born: what the step itself noted, and what it shows when
it is computed again, eagerly and with hooks, from the weights before it."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from model_check.engine.distributed.world import World
from model_check.engine.optim import AdamW, total_norm
from model_check.engine.reading import StepMetrics
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, backward
from model_check.engine.uncompiled import uncompiled
from model_check.events import Origin
from model_check.forensics.origin import (
    INPUT_GRADIENT,
    LOSS,
    OUTPUT,
    Found,
    of_gradient,
    of_state,
    origin_of,
    searched,
)
from model_check.forensics.scan import BadTensor, is_finite
from model_check.model import Llama


def noted_origin(state: TrainingState, plan: StepPlan, metrics: StepMetrics) -> Origin | None:
    """What the step noted while it was computed: a block, or the gradient of one parameter."""
    if metrics.details is None:
        return None
    noted = plan.watch.first_noted(metrics.details)
    own_loss = metrics.loss if metrics.own_loss is None else metrics.own_loss
    if not math.isfinite(own_loss) and (noted is None or not noted.is_forward):
        return _of_loss(own_loss)
    if noted is None:
        return _noted_gradient(state, plan.watch.bad_norms(metrics.details))
    return Origin(
        direction="forward" if noted.is_forward else "backward",
        module=noted.made_by,
        tensor=OUTPUT if noted.is_forward else INPUT_GRADIENT,
        shape=[sum(inputs.numel() for inputs, *_ in metrics.data.micro_batches)],
        num_nan=noted.num_nan,
        num_inf=noted.num_inf,
        first=[noted.first],
        by_position=True,
    )


def bad_state(model: nn.Module, optimizer: AdamW) -> Found | None:
    """What was not finite before the step: a buffer, a moment, a weight. A moment comes before the
    weight that it has spoilt."""
    return of_state(_kept(model, optimizer))


def repeated_origin(
    model: Llama, optimizer: AdamW, metrics: StepMetrics, plan: StepPlan
) -> tuple[Found | None, bool]:
    """The step computed again, and whether its loss or norm is not finite again: these sums can
    exceed float32 where each number in them is finite, and then no module is found. `.grad` holds
    the gradients of this second computation afterwards."""
    optimizer.zero_grad()
    plan.watch.begin()
    micro_batches, losses = metrics.data.micro_batches, []
    searching = searched(model, plan.world.hooked)
    with uncompiled(model), searching as search, plan.forward_context(), plan.world.computing():
        for number, micro_batch in enumerate(micro_batches, start=1):
            with _summing(plan.world, is_last=number == len(micro_batches)):
                losses.append(
                    backward(model.summed_loss, micro_batch, metrics.data, optimizer, plan)
                )
            search.conclude()
    plan.world.wait_for_device()
    loss = float(torch.stack(losses).sum())  # sync
    of_loss = None if math.isfinite(loss) else Found(_of_loss(loss))
    found = search.found or of_loss or _bad_sum(optimizer)
    # By all ranks, also by one that has found it: those that share a model sum their norms.
    norm = total_norm(optimizer.grad_norms())
    return found, found is not None or not is_finite(norm)


def _summing(world: World, is_last: bool) -> AbstractContextManager[object]:
    """Replicas sum nothing: the gradients of this rank alone are of interest."""
    return world.reducing(is_last) if world.is_sharded else nullcontext()


def _of_loss(loss: float) -> Origin:
    kinds = (int(math.isnan(loss)), int(math.isinf(loss)))
    return origin_of("forward", LOSS, BadTensor(OUTPUT, (), *kinds, ()))


def _noted_gradient(state: TrainingState, numbers: list[int]) -> Origin | None:
    """The gradient that was computed first: the backward pass ends with the model's beginning."""
    named = [(name, p) for name, p in state.optimizer.named.items() if p.grad is not None]
    if not numbers:
        return None
    name, parameter = named[numbers[-1]]
    assert parameter.grad is not None
    if not is_finite(parameter.grad):
        return of_gradient(name, parameter.grad).origin
    # A later step has overwritten it, or its norm exceeds float32.
    module, _, leaf = name.rpartition(".")
    shape = tuple(parameter.shape)
    return origin_of("backward", module, BadTensor(f"gradient of {leaf}", shape, 0, 0, ()))


def _bad_sum(optimizer: AdamW) -> Found | None:
    """Gradients that are finite in each micro-batch, and whose sum is not."""
    for name, parameter in reversed(optimizer.named.items()):
        if parameter.grad is not None and not is_finite(parameter.grad):
            return of_gradient(name, parameter.grad)
    return None


def _kept(model: nn.Module, optimizer: AdamW) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    for kind, moments in optimizer.moments.items():
        yield from ((f"{kind} of {n}", m) for n, m in zip(optimizer.named, moments, strict=True))
    yield from ((name, parameter.detach()) for name, parameter in optimizer.named.items())
