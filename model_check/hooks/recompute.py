"""Where the first NaN or Inf of a step comes from: by what was noted during the step itself, and by
computing it again, eagerly and with torch's hooks, from the weights before it."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from model_check.dist.world import World
from model_check.engine.results import StepData, StepMetrics
from model_check.engine.uncompiled import uncompiled
from model_check.events import Origin
from model_check.forensics.optimizer import Optimizer, moments_of
from model_check.forensics.origin import (
    INPUT_GRADIENT,
    LOSS,
    OUTPUT,
    Found,
    Search,
    of_gradient,
    of_state,
    origin_of,
    searched,
)
from model_check.forensics.scan import BadTensor, is_finite
from model_check.hooks.site_monitor import NonFiniteSite
from model_check.optim import total_norm

Repeat = Callable[[StepData, Search], Tensor]
"""Computes both passes of a step again, which the search watches; returns the mean loss. `.grad`
holds the gradients afterwards."""


def noted_origin(
    optimizer: Optimizer, metrics: StepMetrics, site: NonFiniteSite | None
) -> Origin | None:
    """The origin by what was noted while the step was computed: a block, or the gradient of one
    parameter. `site`: the first that was not finite."""
    own_loss = metrics.loss if metrics.own_loss is None else metrics.own_loss
    if not math.isfinite(own_loss) and (site is None or not site.is_forward):
        return _of_loss(own_loss)
    if site is None:
        return _noted_gradient(optimizer, bad_norms(optimizer, metrics))
    return Origin(
        direction="forward" if site.is_forward else "backward",
        module=site.made_by,
        tensor=OUTPUT if site.is_forward else INPUT_GRADIENT,
        shape=[sum(inputs.numel() for inputs, *_ in metrics.data.micro_batches)],
        num_nan=site.num_nan,
        num_inf=site.num_inf,
        first=[site.first],
        by_position=True,
    )


def bad_norms(optimizer: Optimizer, metrics: StepMetrics) -> list[str]:
    """Names the parameters whose gradients' norms were not finite, in the order of the model."""
    norms, names = metrics.result.grad_norms.tolist(), list(optimizer.named)
    if len(norms) < len(names):
        names = [name for name, p in optimizer.named.items() if p.grad is not None]
    return [name for name, norm in zip(names, norms, strict=False) if not math.isfinite(norm)]


def bad_state(model: nn.Module, optimizer: Optimizer) -> Found | None:
    """Returns what was not finite before the step: a buffer, a moment, a weight. A moment comes
    before the weight that it has spoilt."""
    return of_state(_kept(model, optimizer))


def repeated_origin(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    repeat: Repeat,
    data: StepData,
) -> tuple[Found | None, bool]:
    """Compute the step again; return the origin, and whether loss or norm is not finite again:
    these sums can exceed float32 where each number in them is finite, and then no module is found.
    `.grad` holds the gradients of this second computation afterwards."""
    with uncompiled(model), searched(model, world.hooked) as search, world.computing():
        loss = repeat(data, search)
    world.wait_for_device()
    total = float(loss)  # sync
    of_loss = None if math.isfinite(total) else Found(_of_loss(total))
    found = search.found or of_loss or _bad_sum(optimizer)
    # By all ranks, also by one that has found it: those that share a model sum their norms.
    norm = total_norm(optimizer.grad_norms())
    return found, found is not None or not is_finite(norm)


def _of_loss(loss: float) -> Origin:
    kinds = (int(math.isnan(loss)), int(math.isinf(loss)))
    return origin_of("forward", LOSS, BadTensor(OUTPUT, (), *kinds, ()))


def _noted_gradient(optimizer: Optimizer, names: list[str]) -> Origin | None:
    """The gradient that was computed first: the backward pass ends with the model's beginning."""
    if not names:
        return None
    name, parameter = names[-1], optimizer.named[names[-1]]
    assert parameter.grad is not None
    if not is_finite(parameter.grad):
        return of_gradient(name, parameter.grad).origin
    # A later step has overwritten it, or its norm exceeds float32.
    module, _, leaf = name.rpartition(".")
    shape = tuple(parameter.shape)
    return origin_of("backward", module, BadTensor(f"gradient of {leaf}", shape, 0, 0, ()))


def _bad_sum(optimizer: Optimizer) -> Found | None:
    """Gradients that are finite in each micro-batch, and whose sum is not."""
    for name, parameter in reversed(optimizer.named.items()):
        if parameter.grad is not None and not is_finite(parameter.grad):
            return of_gradient(name, parameter.grad)
    return None


def _kept(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    for kind, name, moment in moments_of(optimizer):
        yield f"{kind} of {name}", moment
    yield from ((name, parameter.detach()) for name, parameter in optimizer.named.items())
