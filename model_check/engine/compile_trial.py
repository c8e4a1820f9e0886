"""The trial of a faster path before a run trusts it: both passes of a few steps, held against those
of the plain path. A trial that is passed is evidence, and no proof."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.config.schema import Settings
from model_check.engine.results import StepData

NUM_STEPS = 3
NUM_CALLS = 3
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the loss, as a share of it."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Of a gradient's error, as a share of its size. Measured on a CPU, two blocks: below 1e-6 and
0.007; a GPU adds in other orders."""
_EPS = torch.finfo(torch.float32).eps
"""Of all gradients together: an error below it is rounding, in products of 16 bits, too, whose sums
are in float32. (Of a gradient that is 0 but for its rounding, 1e-9 were measured.)"""
_PART = 1 << 20
_SAMPLE = 4096
"""Numbers of a gradient that are held against each other; of its whole, its norm."""


class Pass(NamedTuple):
    """What both passes of a step leave."""

    loss: Tensor
    gradients: Sequence[Tensor]
    """In the order of the model."""


Run = Callable[[StepData], Pass]


def random_steps(
    settings: Settings, vocab_size: int, device: torch.device, num_micro_batches: int = 1
) -> list[StepData]:
    """Of the shapes and kinds of tensors that every step will have."""
    steps = []
    for seed in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(seed)
        drawn = [_random_batch(settings, vocab_size, generator) for _ in range(num_micro_batches)]
        num_tokens = num_micro_batches * drawn[0][0].numel()
        batches = [tuple(tensor.to(device) for tensor in batch) for batch in drawn]
        steps.append(StepData(-1, batches, num_tokens, num_tokens))
    return steps


def _random_batch(
    settings: Settings, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    shape = (settings.training.batch_size, settings.training.context_length)
    batch = [torch.randint(vocab_size, shape, generator=generator) for _ in range(2)]
    if settings.data.document_masking:
        batch.append((torch.arange(shape[1]) // max(1, shape[1] // 3)).repeat(shape[0], 1))
    return tuple(batch)


def obstacle_of(
    fast: Run,
    plain: Run,
    steps: Sequence[StepData],
    names: Sequence[str],
    dtype: torch.dtype,
    *,
    deterministic: bool,
    plain_name: str = "eager code",
) -> str | None:
    """What is wrong with `fast`; None: on each of `steps` it computes what `plain` computes, within
    the rounding of products in `dtype`, and where `deterministic` is promised its own bits again.
    `names`: of the parameters. `plain_name`: for a sentence. It waits for the device. What they
    raise goes on.

    All passes are made, whatever they show: where ranks share a model they compute together.
    """
    found: list[str | None] = []
    for data in steps:
        first, *again = [_digest(fast(data)) for _ in range(NUM_CALLS if deterministic else 1)]
        plainly = _digest(plain(data))
        found += [_varying(first, again, names), _off(first, plainly, names, dtype, plain_name)]
    return next(filter(None, found), None)


class _Digest(NamedTuple):
    """On the host: gradients of a whole model are held once, on its device."""

    loss: float
    norms: list[float]
    samples: list[Tensor]
    """Of each gradient, float32."""
    sums: list[int]
    """Of each gradient's bits."""


def _digest(done: Pass) -> _Digest:
    gradients = [gradient.detach() for gradient in done.gradients]
    return _Digest(
        float(done.loss),
        torch.stack(torch._foreach_norm(gradients)).tolist(),
        [_sample(gradient) for gradient in gradients],
        [_sum_of_bits(gradient) for gradient in gradients],
    )


def _sum_of_bits(gradient: Tensor) -> int:
    """Part by part: a CPU writes out what it adds up, in 64 bits."""
    parts = torch.split(gradient.view(torch.int32).view(-1), _PART)
    return int(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum())


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    # A copy on a CPU, too: a view would hold the whole gradient.
    return flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float32, copy=True)


def _varying(first: _Digest, others: Sequence[_Digest], names: Sequence[str]) -> str | None:
    for other in others:
        if other.loss.hex() != first.loss.hex():
            return f"{NUM_CALLS} equal steps give other bits of the loss"
        pairs = zip(names, first.sums, other.sums, strict=True)
        if varying := next((name for name, one, two in pairs if one != two), None):
            return f"{NUM_CALLS} equal steps give other bits of the gradient of {varying}"
    return None


def _off(
    fast: _Digest, plain: _Digest, names: Sequence[str], dtype: torch.dtype, plain_name: str
) -> str | None:
    if not math.isclose(fast.loss, plain.loss, rel_tol=LOSS_TOLERANCE[dtype]):
        return f"its loss is {fast.loss:.6g}, and {plain.loss:.6g} by {plain_name}"
    limit, rounding = TOLERANCE[dtype], _EPS * math.hypot(*plain.norms)
    columns = zip(names, fast.norms, plain.norms, fast.samples, plain.samples, strict=True)
    for name, norm, wanted, sample, expected in columns:
        of_norm = _share(abs(norm - wanted), wanted, rounding)
        of_sample = _share(float((sample - expected).norm()), float(expected.norm()), rounding)
        if not max(of_norm, of_sample) <= limit:  # a NaN is no number within it
            error = max(of_norm, of_sample)
            return (
                f"the gradient of {name} is off by {error:.2g} of its size ({limit:g} is allowed)"
            )
    return None


def _share(error: float, size: float, rounding: float) -> float:
    """Of a size. Nothing is left of some gradients but `rounding` (of a query's weights, where each
    position sees itself alone), or nothing at all (of a row that no token has)."""
    if error <= rounding:
        return 0.0
    return error / size if size else math.inf
