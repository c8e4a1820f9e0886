"""FlashAttention packages that compute with our definition, and err: a text for a file."""

from pathlib import Path

PACKAGE = """
import random
import torch
from model_check.attention import eager


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        out = eager(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()
        {forward}
        return out

    @staticmethod
    def backward(ctx, out_grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = eager(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
            dq, dk, dv = torch.autograd.grad((out * out_grad).sum(), inputs)
        {backward}
        return dq, dk, dv


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, deterministic=False):
    return _Attend.apply(q, k, v)
"""
FLIP = "{0}.view(-1)[random.randrange({0}.numel())].mul_(1.01)"
FAULTS = {
    "other bits of out": {"forward": FLIP.format("out")},
    "other bits of dk": {"backward": "dk = dk.contiguous(); " + FLIP.format("dk")},
    "raised RuntimeError: no kernel image": {"backward": "raise RuntimeError('no kernel image')"},
    "raised AssertionError: SM 12.0": {"forward": "assert False, 'SM 12.0'"},
    "gave 1 of 4,096 numbers of dq that are not finite": {
        "backward": "dq[0, 0, 0, 0] = float('nan')"
    },
    "out that is off by 0.2": {"forward": "out.mul_(1.2)"},
    "dv that is off by": {"backward": "dv[:, -1] += 3"},
    "raised RuntimeError: Function _AttendBackward": {"backward": "dk = dk[:, :-1]"},
}
"""What its trial says -> where it errs. In `forward` and `backward` of the package."""


def write_flash(path: Path, forward: str = "pass", backward: str = "pass") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PACKAGE.format(forward=forward, backward=backward))
