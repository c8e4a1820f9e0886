"""The trial of an attention backend before a run trusts it: forward and backward pass on the run's
own shapes, three times. What a package says of itself is no evidence: FlashAttention 3 and 4 have
accepted `deterministic=True` and ignored it (flash-attention #1596, #2510).

A trial that is passed is evidence, and no proof: other data, longer sequences or a busier GPU may
still show what three calls did not. The first step of a run is repeated for the same reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.models.attention import AttentionFn, eager, visible_within
from model_check.utils.words import first_line

NUM_CALLS = 3
LONGEST = 2048
"""Positions: several blocks of every kernel, whose sums then have an order that can vary."""
CPU_BUDGET = 2**26
"""Of H x T x T x D on a CPU: about 30 ms a call (one core, bfloat16 and float32, measured)."""
SHORTEST = 64
FEWEST_ROWS = 64
"""Positions of all sequences: a short one is drawn so often. Of a few rows all may cancel, and then
rounding alone is left to be held against."""
MOST_SCORES = 2**27
"""T x T scores of the group that is held against the definition: 512 MiB of float32 a tensor, which
has five to ten of them."""
_NARROW = 32
"""Of a narrower head a CPU spends its time on scores, not on products (measured)."""
_FEWEST = 2
"""Of one position alone, q and k have no gradients to be held against anything."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of a row's error, as a share of the row, or of the mean row where that is larger. Measured on a
CPU, sdpa and eager alike: at most 6e-6, 0.02 and 0.004. Of float32 more is allowed than a CPU
needs: GPUs add in other orders."""
_FEW = 8
"""Numbers of a row, of fewer of which the error is less of a mean: more is allowed."""
_NAMES = ("out", "dq", "dk", "dv")
_MOST_NODES = 20
"""Of autograd's graph between the output and the kernel."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Width of an element in bytes -> the integers that show its bits, the sign of 0 too."""


@dataclass(frozen=True)
class AttentionShape:
    """What one block of the run asks of its kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    time: int
    """Positions that attend to each other: the context, or a segment."""

    def tried_time(self, device: torch.device) -> int:
        """Positions of a trial."""
        time = min(max(self.time, _FEWEST), LONGEST)
        while time > SHORTEST and self._is_too_much(time, device):
            time = max(SHORTEST, time // 2)
        return time

    def _is_too_much(self, time: int, device: torch.device) -> bool:
        if self.num_heads // self.num_kv_heads * time * time > MOST_SCORES:
            return True
        work = self.num_heads * time * time * max(_NARROW, self.head_dim)
        return device.type == "cpu" and work > CPU_BUDGET


class Tried(NamedTuple):
    """What came of a trial."""

    kernel: str | None
    """`ScaledDotProductFlashAttentionForCpu`; None: attention was computed by several operators."""
    obstacle: str | None
    """What it did wrong, for `it ...`; None: it passed."""


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out_grad: Tensor
    visible: Tensor | None

    def group(self, number: int, dtype: torch.dtype) -> "_Inputs":
        """This key/value head with its query heads, in `dtype`."""
        num = self.q.shape[1] // self.k.shape[1]
        q, k, v, out_grad = (
            x.detach()[:, number * heads : (number + 1) * heads].to(dtype).requires_grad_()
            for x, heads in ((self.q, num), (self.k, 1), (self.v, 1), (self.out_grad, num))
        )
        return _Inputs(q, k, v, out_grad.detach(), self.visible)


def try_attention(
    attend: AttentionFn,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
    documents: bool,
) -> Tried:
    """Call `attend` on random numbers of these shapes, drawn from a generator of its own. Whatever
    it raises is an obstacle, but for a want of memory: that is no kernel's fault. One that never
    returns is ended by the launcher's limit of silence."""
    try:
        inputs = _inputs(shape, device, dtype, documents=documents)
        kernel = _name_of_kernel(attend(*inputs[:3], inputs.visible))
        return Tried(kernel, _obstacle(attend, inputs, deterministic=deterministic))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    # Kernels raise what they like: AssertionError, TypeError, CUDA's RuntimeError.
    except Exception as error:
        return Tried(None, raised(error))


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


def _inputs(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, *, documents: bool
) -> _Inputs:
    generator, time = torch.Generator(device).manual_seed(0), shape.tried_time(device)
    num_sequences = -(-FEWEST_ROWS // time)

    def draw(num_heads: int) -> Tensor:
        # Heads lie within positions, as a block's products leave them: kernels ask for strides.
        sizes = (num_sequences, time, num_heads, shape.head_dim)
        drawn = torch.randn(sizes, generator=generator, device=device).to(dtype)
        return drawn.transpose(1, 2)

    q, k, v = (draw(n).requires_grad_() for n in (shape.num_heads, *[shape.num_kv_heads] * 2))
    # The border of documents is no multiple of any kernel's block. The first has _FEWEST positions.
    numbers = torch.arange(time, device=device).expand(num_sequences, time)
    is_second = numbers > max(_FEWEST - 1, time // 3)
    visible = visible_within(is_second.long()) if documents else None
    return _Inputs(q, k, v, draw(shape.num_heads), visible)


def _obstacle(attend: AttentionFn, inputs: _Inputs, *, deterministic: bool) -> str | None:
    first = _passes(attend, inputs)
    for name, tensor in zip(_NAMES, first, strict=True):
        if num_bad := int((~tensor.isfinite()).sum()):
            return f"gave {num_bad:,} of {tensor.numel():,} numbers of {name} that are not finite"
    if deterministic and (varying := _varying(first, attend, inputs)):
        return f"gave other bits of {', '.join(varying)} in {NUM_CALLS} equal calls"
    return _error(first, inputs)


def _passes(attend: AttentionFn, inputs: _Inputs) -> tuple[Tensor, ...]:
    """out, dq, dk, dv"""
    q, k, v, out_grad, visible = inputs
    out = attend(q, k, v, visible)
    # A product and a sum: where torch is handed a gradient it imports sympy, for 0.4 s.
    return out.detach(), *torch.autograd.grad((out * out_grad).sum(), (q, k, v))


def _varying(first: Sequence[Tensor], attend: AttentionFn, inputs: _Inputs) -> list[str]:
    """The names of those that a further call gives other bits of."""
    others = [_passes(attend, inputs) for _ in range(NUM_CALLS - 1)]
    return [
        name
        for name, *tensors in zip(_NAMES, first, *others, strict=True)
        if not all(torch.equal(_bits(tensors[0]), _bits(tensor)) for tensor in tensors[1:])
    ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _error(first: Sequence[Tensor], inputs: _Inputs) -> str | None:
    """Held against the definition, in float32 for 16 bits and else in float64; computed group by
    group, for the T x T scores of one are small."""
    dtype = first[0].dtype
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    groups = [_passes(eager, inputs.group(number, exact)) for number in range(inputs.k.shape[1])]
    allowed = TOLERANCE[dtype] * max(1.0, _FEW / inputs.q.shape[-1]) ** 0.5
    for name, tensor, *parts in zip(_NAMES, first, *groups, strict=True):
        wanted = torch.cat(parts, dim=1)
        if tensor.shape != wanted.shape or tensor.dtype != dtype:
            return f"gave {name} as {list(tensor.shape)} of {tensor.dtype}"
        error = _row_error(tensor.to(exact), wanted)
        if not error <= allowed:  # a NaN is within nothing: the device may spoil both
            return f"gave {name} that is off by {error:.2g} of its size ({allowed:.2g} is allowed)"
    return None


def _row_error(got: Tensor, wanted: Tensor) -> float:
    """Of the worst row. Rows whose gradients cancel are held against the mean row."""
    size = torch.maximum(_size(wanted, dim=-1), _size(wanted, dim=None))
    return float((_size(got - wanted, dim=-1) / size).max())


def _size(x: Tensor, dim: int | None) -> Tensor:
    return x.square().mean(dim=dim).sqrt()


def _name_of_kernel(out: Tensor) -> str | None:
    """Of the node of autograd's graph that attends. Of torch's own kernels each has one, but for
    the math kernel, which is many operators. Not from a profile: CUPTI, once started, stays."""
    nodes = [out.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _MOST_NODES:
            continue
        if any(word in node.name().lower() for word in ("attention", "attn", "flash")):
            return node.name().removesuffix("0").removesuffix("Backward")
        nodes += [before for before, _ in node.next_functions]
    return None
