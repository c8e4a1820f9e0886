"""One check for every fast kernel before a run trusts it: does it compute what plain code computes,
and where that is promised the same bits in each call? What a package says of itself is no evidence.
A check that is passed is evidence, and no proof: the first step of a run is repeated for the same
reason.

Attention and AdamW are checked here; compiled code, which needs the model, in `engine.compile`.
`engine.kernels` chooses by what the checks show.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from model_check.attention import AttentionFn, eager, visible_within
from model_check.utils.words import first_line

NUM_CALLS = 3
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Width of a value in bytes -> the integers that show its bits, the sign of 0 too."""


class Output(NamedTuple):
    """What a kernel computed, or a digest of it."""

    values: Tensor
    """They are held against those of the reference."""
    bits: Tensor
    """Integers, the same in every call."""


Outputs = Mapping[str, Output]
"""Name, for a sentence -> output."""
Inputs = TypeVar("Inputs")


Tolerance = Callable[[Inputs, Outputs, Outputs], str | None]
"""(inputs, the kernel's outputs, those of its reference) -> what is wrong; None: nothing."""


def _other_bits(names: Sequence[str]) -> str:
    return f"gave other bits of {', '.join(names)} in {NUM_CALLS} equal calls"


def check_kernel(
    candidate: Callable[[Inputs], Outputs],
    reference: Callable[[Inputs], Outputs],
    inputs: Iterable[Inputs],
    tolerance: Tolerance[Inputs],
    num_calls: int = NUM_CALLS,
    varying: Callable[[list[str]], str] = _other_bits,
) -> str | None:
    """What is wrong with `candidate`; None: on each of `inputs` it computes what `reference`
    computes, with the same bits in `num_calls` calls. `varying`: says which outputs had other
    bits. It waits for the device, and holds two outputs at a time. What they raise goes
    on.

    All calls are made, whatever they show: where ranks share a model they compute together.
    """
    found: list[str | None] = []
    for given in inputs:
        first, names = candidate(given), dict[str, None]()
        for _ in range(num_calls - 1):
            names |= dict.fromkeys(_differing(first, candidate(given)))
        found.append(varying([*names]) if names else None)
        found.append(tolerance(given, first, reference(given)))
    return next(filter(None, found), None)


def _differing(first: Outputs, again: Outputs) -> Iterator[str]:
    pairs = zip(first.items(), again.values(), strict=True)
    return (name for (name, one), other in pairs if not torch.equal(one.bits, other.bits))


def whole(values: Tensor) -> Output:
    """Returns all of `values` as an output: any shape, a dtype of 2, 4 or 8 bytes; `bits` are the
    same memory, read as int16, int32 or int64."""
    return Output(values, values.view(_BITS[values.element_size()]))


def raised(error: Exception) -> str:
    """What a kernel did that raises."""
    return f"raised {type(error).__name__}: {first_line(error).rstrip('.')}"


def answers(device: torch.device) -> bool:
    """Whether it still computes: after some errors CUDA refuses this process whatever it asks, and
    after others (no kernel image for this GPU) it goes on. Waits for the device."""
    try:
        return bool(torch.ones(2, device=device).sum() == 2)  # sync
    except RuntimeError:  # also what is no error of CUDA's own, like that of a driver that is gone
        return False


# Attention. B batch, H query heads, G key/value heads, T time, D width of a head.

MAX_POSITIONS = 2048
"""Positions: several blocks of every kernel, whose sums then have an order that can vary."""
MIN_POSITIONS = 64
CPU_PRODUCTS = 2**26
"""H x T x T x D on a CPU: about 30 ms a call (one core, bfloat16 and float32, measured)."""
_NARROW = 32
"""With a narrower head a CPU spends its time on scores, not on products (measured)."""
MIN_ROWS = 64
"""Positions of all sequences: a short one is drawn so often. Of a few rows all may cancel, and then
only their rounding is left to compare with."""
MAX_SCORES = 2**20
"""Scores of the definition at a time: 4 MiB of float32 a tensor, which has five to ten of them. The
runtime's part of the memory plan (config/memory.py) covers that."""
_MIN_TIME = 2
"""With one position alone, q and k have no gradients to compare."""
ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""A row's error, as a share of the row, or of the mean row where that is larger. Measured on a
CPU, sdpa and eager alike: at most 6e-6, 0.02 and 0.004. Float32 may have more than a CPU needs:
GPUs add in other orders."""
_FEW_NUMBERS = 8
"""The error of a row with fewer numbers is less of a mean: more is allowed."""
_MAX_NODES = 20
"""Of autograd's graph between the output and the kernel."""


@dataclass(frozen=True)
class AttentionShape:
    """What one block of the run asks of its kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    time: int
    """Positions that attend to each other: the context, or a segment."""

    def tried_time(self, device: torch.device) -> int:
        """Positions of a check."""
        time = min(max(self.time, _MIN_TIME), MAX_POSITIONS)
        of_positions = self.num_heads * max(_NARROW, self.head_dim)
        if device.type == "cpu":
            while time > MIN_POSITIONS and of_positions * time**2 > CPU_PRODUCTS:
                time = max(MIN_POSITIONS, time // 2)
        return time


class Tried(NamedTuple):
    """What came of a check."""

    kernel: str | None
    """`ScaledDotProductFlashAttentionForCpu`; None: attention was computed by several operators."""
    obstacle: str | None
    """What it did wrong, for `it ...`; None: it passed."""


class _AttentionInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out_grad: Tensor
    visible: Tensor | None


def try_attention(
    attend: AttentionFn,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
    documents: bool,
) -> Tried:
    """Check `attend`, both passes, on random numbers of these shapes, drawn from a generator of its
    own. Whatever it raises is an obstacle, but for a want of memory: that is no kernel's fault. One
    that never returns is ended by the launcher's limit of silence."""
    candidate, num_calls = partial(_both_passes, attend), NUM_CALLS if deterministic else 1
    try:
        given = _attention_inputs(shape, device, dtype, documents=documents)
        kernel = _name_of_kernel(attend(given.q, given.k, given.v, given.visible))
        obstacle = check_kernel(candidate, _definition, [given], _attention_off, num_calls)
        return Tried(kernel, obstacle)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    # Kernels raise what they like: AssertionError, TypeError, CUDA's RuntimeError.
    except Exception as error:
        return Tried(None, raised(error))


def _attention_inputs(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, *, documents: bool
) -> _AttentionInputs:
    generator, time = torch.Generator(device).manual_seed(0), shape.tried_time(device)
    num_sequences = -(-MIN_ROWS // time)

    def draw(num_heads: int) -> Tensor:
        # Heads lie within positions, as a block's products leave them: kernels ask for strides.
        sizes = (num_sequences, time, num_heads, shape.head_dim)
        drawn = torch.randn(sizes, generator=generator, device=device).to(dtype)
        return drawn.transpose(1, 2)

    q, k, v = (draw(n).requires_grad_() for n in (shape.num_heads, *[shape.num_kv_heads] * 2))
    # The border of documents is no multiple of a kernel's block. The first has _MIN_TIME positions.
    numbers = torch.arange(time, device=device).expand(num_sequences, time)
    is_second = numbers > max(_MIN_TIME - 1, time // 3)
    visible = visible_within(is_second.long()) if documents else None
    return _AttentionInputs(q, k, v, draw(shape.num_heads), visible)


def _both_passes(attend: AttentionFn, given: _AttentionInputs) -> Outputs:
    q, k, v, out_grad, visible = given
    out = attend(q, k, v, visible)
    # A product and a sum: where torch is handed a gradient it imports sympy, for 0.4 s.
    dq, dk, dv = torch.autograd.grad((out * out_grad).sum(), (q, k, v))
    return {"out": whole(out.detach()), "dq": whole(dq), "dk": whole(dk), "dv": whole(dv)}


def _definition(given: _AttentionInputs) -> Outputs:
    """In float32 for 16 bits and otherwise in float64; a few rows of one group of heads at a time,
    whose scores are small."""
    exact = torch.float64 if given.q.dtype == torch.float32 else torch.float32
    num_groups, time = given.k.shape[1], given.q.shape[2]
    visible = given.visible
    if visible is None:  # one document
        visible = visible_within(torch.zeros(1, time, device=given.q.device))
    per_group = given.q.shape[1] // num_groups
    num_rows = max(1, MAX_SCORES // (given.q.shape[0] * per_group * time))
    out, dq, dk, dv = (torch.zeros_like(x, dtype=exact) for x in (given.q, *given[:3]))
    for group in range(num_groups):
        own, heads = slice(group, group + 1), slice(group * per_group, (group + 1) * per_group)
        k, v = (x.detach()[:, own].to(exact).requires_grad_() for x in (given.k, given.v))
        for first in range(0, time, num_rows):
            rows = slice(first, first + num_rows)
            q = given.q.detach()[:, heads, rows].to(exact).requires_grad_()
            part = eager(q, k, v, visible[:, :, rows])
            product = part * given.out_grad[:, heads, rows]
            gradients = torch.autograd.grad(product.sum(), (q, k, v))
            out[:, heads, rows], dq[:, heads, rows] = part.detach(), gradients[0]
            dk[:, own] += gradients[1]
            dv[:, own] += gradients[2]
    return {"out": whole(out), "dq": whole(dq), "dk": whole(dk), "dv": whole(dv)}


def _attention_off(given: _AttentionInputs, got: Outputs, wanted: Outputs) -> str | None:
    allowed = ATTENTION_TOLERANCE[given.q.dtype] * max(1.0, _FEW_NUMBERS / given.q.shape[-1]) ** 0.5
    for name, (tensor, _) in got.items():
        if num_bad := int((~tensor.isfinite()).sum()):
            return f"gave {num_bad:,} of {tensor.numel():,} numbers of {name} that are not finite"
    for name, (tensor, _) in got.items():
        exact = wanted[name].values
        if tensor.shape != exact.shape or tensor.dtype != given.q.dtype:
            return f"gave {name} as {list(tensor.shape)} of {tensor.dtype}"
        error = _row_error(tensor.to(exact.dtype), exact)
        if not error <= allowed:  # a NaN is within nothing: the device may spoil both
            return f"gave {name} that is off by {error:.2g} of its size ({allowed:.2g} is allowed)"
    return None


def _row_error(got: Tensor, wanted: Tensor) -> float:
    """The worst row's. Rows whose gradients cancel are held against the mean row."""
    size = torch.maximum(_size(wanted, dim=-1), _size(wanted, dim=None))
    return float((_size(got - wanted, dim=-1) / size).max())


def _size(x: Tensor, dim: int | None) -> Tensor:
    return x.square().mean(dim=dim).sqrt()


def _name_of_kernel(out: Tensor) -> str | None:
    """The node of autograd's graph that attends. Each of torch's own kernels has one, but for the
    math kernel, which is many operators. Not from a profile: CUPTI, once started, stays."""
    nodes = [out.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _MAX_NODES:
            continue
        if any(word in node.name().lower() for word in ("attention", "attn", "flash")):
            return node.name().removesuffix("0").removesuffix("Backward")
        nodes += [before for before, _ in node.next_functions]
    return None


# AdamW

Update = Callable[..., Any]
"""A function with the signature of torch._fused_adamw_."""
_SIZES = (1, 7, 66_037)
"""No multiples of what a kernel reads at once, and more than one block of 65,536 values on a GPU
(kChunkSize in torch's multi_tensor_apply)."""
_ADAMW_TOLERANCE = 1e-5
"""As a share of a value, before and after the update: where both nearly cancel, their rounding
stays. The operators differ in the order of their products (measured on a CPU, 12
seeds: 5e-7)."""
_ADAMW_OPTIONS = {
    **{"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
    **{"amsgrad": False, "maximize": False},
}
_SEED = 0
_STATE = ("weights", "gradients", "first moments", "second moments")


class _AdamwInputs(NamedTuple):
    state: list[list[Tensor]]
    """A list of tensors for each of _STATE."""
    refused: bool
    """The update must leave all of it."""


def check_update(update: Update, device: torch.device) -> str | None:
    """What is wrong with `update`, for `it ...`; None: on `device` it computes AdamW, the same bits
    in two calls, and changes nothing in a step that it must refuse. Raises
    torch.OutOfMemoryError."""
    inputs = [_AdamwInputs(_state(device), refused) for refused in (False, True)]
    try:
        return check_kernel(
            partial(_updated, update),
            partial(_updated, plain_adamw_),
            inputs,
            _adamw_off,
            2,
            lambda names: f"gave other bits of {names[0]} in two equal calls",
        )
    except torch.OutOfMemoryError:
        raise
    # A private operator may be gone, or take other arguments.
    except Exception as error:
        return raised(error)


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
    """AdamW written out (Loshchilov, Hutter: Decoupled Weight Decay Regularization, arXiv
    1711.05101, algorithm 2), with the gate and the divisor of `torch._fused_adamw_`: in place;
    gradients are divided by `grad_scale` and stay so; nothing changes where `found_inf` is 1.
    Slower by several passes over the state.

    Each parameter's tensors have one shape, any. `steps`: scalars, which count this step already;
    `grad_scale`, `found_inf`: float32 scalars.
    """
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


def _state(device: torch.device) -> list[list[Tensor]]:
    """Weights, gradients, first and second moments: the same each time."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = [[torch.randn(size, generator=generator) for size in _SIZES] for _ in _STATE]
    drawn[3] = [tensor.square() for tensor in drawn[3]]
    return [[tensor.to(device) for tensor in tensors] for tensors in drawn]


@torch.no_grad()
def _updated(update: Update, given: _AdamwInputs) -> Outputs:
    """One step of copies of the state."""
    state = [[tensor.clone() for tensor in tensors] for tensors in given.state]
    device = state[0][0].device
    scale, gate, step = (torch.tensor(x, device=device) for x in (2.5, float(given.refused), 3.0))
    steps = [step] * len(_SIZES)
    update(*state, [], steps, **_ADAMW_OPTIONS, grad_scale=scale, found_inf=gate)
    return {name: whole(torch.cat(each)) for name, each in zip(_STATE, state, strict=True)}


def _adamw_off(given: _AdamwInputs, got: Outputs, wanted: Outputs) -> str | None:
    for name, tensors in zip(_STATE, given.state, strict=True):
        x, y, old = got[name].values, wanted[name].values, torch.cat(tensors)
        if given.refused:
            if not torch.equal(x, old):
                return f"changed {name} in a step that it must refuse"
            continue
        error = float(((x - y).abs() / (y.abs() + old.abs())).max())
        if not error <= _ADAMW_TOLERANCE:  # nor is a NaN
            return f"gave {name} that are off by {error:.2g} of their size"
    return None
