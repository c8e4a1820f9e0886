"""Causal attention: backends of one signature, and the choice among them.

Shapes: B batch, H query heads, G key/value heads (H is a multiple of G), T time, D width of a head.
"""

import importlib
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model_check.errors import ConfigError

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BHTD, k_BGTD, v_BGTD) -> out_BHTD."""

BackendName = Literal["auto", "flash_attn", "sdpa", "eager"]


def eager(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """The definition, T x T scores and all: what the others are compared with."""
    num_queries_per_kv = q_BHTD.shape[1] // k_BGTD.shape[1]
    k_BHTD = k_BGTD.repeat_interleave(num_queries_per_kv, dim=1)
    v_BHTD = v_BGTD.repeat_interleave(num_queries_per_kv, dim=1)
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-2, -1) / math.sqrt(q_BHTD.shape[-1])
    time = q_BHTD.shape[2]
    future_TT = torch.ones(time, time, dtype=torch.bool, device=q_BHTD.device).triu(1)
    scores_BHTT = scores_BHTT.masked_fill(future_TT, float("-inf"))
    return scores_BHTT.softmax(dim=-1).to(v_BHTD.dtype) @ v_BHTD


def sdpa(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """torch's own choice of kernel; under strict determinism it leaves out those that vary."""
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=grouped
    )


def flash_attn(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """The flash-attn package (FlashAttention-2); CUDA, bfloat16 or float16."""
    from flash_attn import flash_attn_func  # optional, and slow to import

    out_BTHD: Tensor = flash_attn_func(
        q_BHTD.transpose(1, 2),
        k_BGTD.transpose(1, 2),
        v_BGTD.transpose(1, 2),
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out_BTHD.transpose(1, 2)


BACKENDS: dict[str, AttentionFn] = {"eager": eager, "sdpa": sdpa, "flash_attn": flash_attn}


def resolve_backend(name: BackendName, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """(backend, reason) for queries of `dtype` on `device`.

    `auto` never fails; a name that cannot be had raises ConfigError with what to do.
    """
    if name in ("eager", "sdpa"):
        return name, "as configured"
    obstacle = _flash_attn_obstacle(device, dtype)
    if obstacle is None:
        return "flash_attn", "as configured" if name == "flash_attn" else "installed and usable"
    if name == "auto":
        return "sdpa", obstacle
    raise ConfigError(
        f"model.attention_backend = 'flash_attn': {obstacle}; set model.attention_backend=auto "
        "to take it only where it can be had"
    )


def _flash_attn_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash_attn cannot be used here; None when it can."""
    if device.type != "cuda":
        return f"flash_attn needs a CUDA GPU, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash_attn needs bfloat16, not {str(dtype).removeprefix('torch.')} (use_amp=true)"
    try:
        importlib.import_module("flash_attn")
    except ModuleNotFoundError:
        return "flash_attn is not installed (pip install flash-attn --no-build-isolation)"
    except ImportError as error:  # built for another torch: an undefined symbol
        return f"flash_attn is installed but broken: {error}"
    return None
