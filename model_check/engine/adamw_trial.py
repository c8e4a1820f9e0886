"""The trial of `torch._fused_adamw_`, a private operator, before the first update: held against
AdamW written out (Loshchilov, Hutter: Decoupled Weight Decay Regularization, arXiv 1711.05101,
algorithm 2), with the gate and the divisor that only the fused one has."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model_check.utils.words import first_line

Update = Callable[..., Any]
"""Of the signature of torch._fused_adamw_."""
FUSED, PLAIN = "fused", "plain"
_SIZES = (1, 7, 66_037)
"""No multiples of what a kernel reads at once, and more than one block of 65,536 values on a GPU
(kChunkSize in torch's multi_tensor_apply)."""
_TOLERANCE = 1e-5
"""As a share of a value, before and after the update: where both nearly cancel, their rounding
stays. The operators differ in the order of their products (measured on a CPU, 12
seeds: 5e-7)."""
_OPTIONS = {
    **{"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
    **{"amsgrad": False, "maximize": False},
}
_SEED = 0
_NAMES = ("weights", "gradients", "first moments", "second moments")


def choose_update(device: torch.device) -> tuple[Update, str | None]:
    """(the update to use on `device`, what the fused one did wrong; None: nothing, it is taken)."""
    try:
        obstacle = _obstacle(torch._fused_adamw_, device)
    except torch.OutOfMemoryError:
        raise
    # A private operator may be gone, or take other arguments.
    except Exception as error:
        obstacle = f"raised {type(error).__name__}: {first_line(error)}"
    return (torch._fused_adamw_, None) if obstacle is None else (plain_adamw_, obstacle)


@torch.no_grad()
def plain_adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    _max_second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """As `torch._fused_adamw_`: in place; gradients are divided by `grad_scale` and stay so;
    nothing changes where `found_inf` is 1. Slower by several passes over the state."""
    assert not amsgrad, "AdamW never asks for it"
    assert not maximize, "nor for this"
    keep = torch.zeros((), dtype=torch.bool) if found_inf is None else found_inf == 1
    keep = keep.to(weights[0].device)
    tensors = zip(weights, gradients, first_moments, second_moments, steps, strict=True)
    for weight, gradient, first, second, step in tensors:
        g = gradient if grad_scale is None else gradient / grad_scale
        m = first.lerp(g, 1 - beta1)
        v = beta2 * second + (1 - beta2) * g * g
        root = (v / (1 - beta2**step)).sqrt() + eps
        decayed = weight * (1 - lr * weight_decay)
        new = decayed - lr * (m / (1 - beta1**step)) / root
        for old, value in ((weight, new), (gradient, g), (first, m), (second, v)):
            old.copy_(torch.where(keep, old, value))


@torch.no_grad()
def _obstacle(update: Update, device: torch.device) -> str | None:
    """What is wrong with it on `device`; None: nothing that three steps show."""
    before, wanted, got, again = (_state(device) for _ in range(4))
    for state, of in ((wanted, plain_adamw_), (got, update), (again, update)):
        _step(of, state, device, refused=False)
    for name, *states in zip(_NAMES, got, wanted, again, before, strict=True):
        for x, y, z, old in zip(*states, strict=True):
            error = float(((x - y).abs() / (y.abs() + old.abs())).max())
            if not error <= _TOLERANCE:  # nor is a NaN
                return f"gave {name} that are off by {error:.2g} of their size"
            if not torch.equal(x.view(torch.int32), z.view(torch.int32)):
                return f"gave other bits of {name} in two equal calls"
    before = [[tensor.clone() for tensor in tensors] for tensors in got]
    _step(update, got, device, refused=True)
    for name, mine, theirs in zip(_NAMES, got, before, strict=True):
        if not all(map(torch.equal, mine, theirs)):
            return f"changed {name} in a step that it must refuse"
    return None


def _state(device: torch.device) -> list[list[Tensor]]:
    """Weights, gradients, first and second moments: the same each time."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = [[torch.randn(size, generator=generator) for size in _SIZES] for _ in _NAMES]
    drawn[3] = [tensor.square() for tensor in drawn[3]]
    return [[tensor.to(device) for tensor in tensors] for tensors in drawn]


def _step(
    update: Update, state: Sequence[list[Tensor]], device: torch.device, *, refused: bool
) -> None:
    scale, gate, step = (torch.tensor(x, device=device) for x in (2.5, float(refused), 3.0))
    steps = [step] * len(_SIZES)
    update(*state, [], steps, **_OPTIONS, grad_scale=scale, found_inf=gate)
