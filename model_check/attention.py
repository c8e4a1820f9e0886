"""Causal attention: functions of one signature, and what makes those of `config.backends`' rows.
`engine.kernels` decides which one is used.

Flash attention, which never holds the T x T scores: Dao et al., FlashAttention: Fast and
Memory-Efficient Exact Attention with IO-Awareness, arXiv 2205.14135, algorithm 1.

Shapes: B batch, H query heads, G key/value heads (H is a multiple of G), T time, D width of a head.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_check.config.backends import BACKENDS

AttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q_BHTD, k_BGTD, v_BGTD, visible_B1TT) -> out_BHTD.

`visible` says which earlier positions each position sees, itself always among them; None: all.
"""
HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256
"""The widest head that torch's fused kernels take."""


def visible_within(documents_BT: Tensor) -> Tensor:
    """bool [B, 1, T, T]: earlier positions of the same document, and itself."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril().unsqueeze(1)


def eager(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, visible_B1TT: Tensor | None = None
) -> Tensor:
    """The definition, with its T x T scores. The others are compared with it."""
    k_BHTD, v_BHTD = _repeated(k_BGTD, q_BHTD), _repeated(v_BGTD, q_BHTD)
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-2, -1) / math.sqrt(q_BHTD.shape[-1])
    if visible_B1TT is None:
        time = q_BHTD.shape[2]
        visible_B1TT = torch.ones(time, time, dtype=torch.bool, device=q_BHTD.device).tril()
    scores_BHTT = scores_BHTT.masked_fill(~visible_B1TT, float("-inf"))
    return scores_BHTT.softmax(dim=-1).to(v_BHTD.dtype) @ v_BHTD


def sdpa(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, visible_B1TT: Tensor | None = None
) -> Tensor:
    """torch's own choice of kernel; under strict determinism it refuses those that vary."""
    if visible_B1TT is None and _takes_groups(q_BHTD):
        grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
        return F.scaled_dot_product_attention(
            q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=grouped
        )
    # Groups are written out for the memory-efficient kernel, which takes a mask and float32, keeps
    # no T x T scores, and knows groups only since torch 2.14. (We have read that, not run it.)
    k_BHTD, v_BHTD = _repeated(k_BGTD, q_BHTD), _repeated(v_BGTD, q_BHTD)
    is_causal = visible_B1TT is None
    return F.scaled_dot_product_attention(
        q_BHTD, k_BHTD, v_BHTD, attn_mask=visible_B1TT, is_causal=is_causal
    )


def _takes_groups(q_BHTD: Tensor) -> bool:
    """Whether a fused kernel of torch takes fewer key/value heads than query heads. On a GPU those
    in 16 bits alone: else torch takes its math kernel without a word, which keeps all scores
    (pytorch #181528)."""
    is_fused = q_BHTD.dtype in HALF and q_BHTD.shape[-1] <= _WIDEST
    return is_fused or not q_BHTD.is_cuda


def attend_cached(q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor) -> Tensor:
    """[B, H, T, D]: causal attention of the last T of N positions to all of them."""
    num_new, num_all = q_BHTD.shape[2], k_BGND.shape[2]
    if num_new == 1:  # it sees all of them: nothing is masked, and no group written out
        return F.scaled_dot_product_attention(q_BHTD, k_BGND, v_BGND, enable_gqa=True)
    if num_new == num_all:
        return sdpa(q_BHTD, k_BGND, v_BGND)
    visible_TN = torch.ones(num_new, num_all, dtype=torch.bool, device=q_BHTD.device)
    return sdpa(q_BHTD, k_BGND, v_BGND, visible_TN.tril(num_all - num_new)[None, None])


def backend(name: str, *, deterministic: bool = False) -> AttentionFn:
    """The function that the row of `name` makes, with all that it needs, so that a compiled block
    calls a plain function. Raises as the row's maker."""
    make: Callable[[bool], AttentionFn] = globals()[BACKENDS[name].make]
    return make(deterministic)


def make_eager(deterministic: bool) -> AttentionFn:
    return eager


def make_sdpa(deterministic: bool) -> AttentionFn:
    return sdpa


def make_cudnn(deterministic: bool) -> AttentionFn:
    """sdpa, with cuDNN before torch's other kernels: whether torch itself prefers it depends on its
    version and the GPU. Flash takes what cuDNN has no execution plan for.

    The order is a switch of the process: a context manager within a compiled block would bypass
    the cache of compiled code (pytorch #194007).
    """
    from torch.nn.attention import SDPBackend

    order = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    named = [int(getattr(SDPBackend, name)) for name in order]
    others = [kernel for kernel in torch._C._get_sdp_priority_order() if kernel not in named]
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch._C._set_sdp_priority_order([*named, *others])
    return sdpa


def make_flash_attn(deterministic: bool) -> AttentionFn:
    """FlashAttention 2, from the package flash-attn. We have never run it on a GPU. Raises
    ImportError, and whatever a package raises that was built for another torch."""
    from flash_attn import flash_attn_func

    options = {"deterministic": True} if deterministic else {}
    attend = partial(flash_attn_func, causal=True, **options)

    def flash_attn(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
        assert visible is None, "flash_attn is never chosen where documents are masked"
        out_BTHD: Tensor = attend(*(x.transpose(1, 2) for x in (q, k, v)))
        return out_BTHD.transpose(1, 2)

    return flash_attn


def _repeated(x_BGTD: Tensor, q_BHTD: Tensor) -> Tensor:
    """[B, H, T, D]: each key/value head once for every query head of its group."""
    times = q_BHTD.shape[1] // x_BGTD.shape[1]
    return x_BGTD if times == 1 else x_BGTD.repeat_interleave(times, dim=1)
