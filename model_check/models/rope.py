"""Rotary position embedding: frequencies, tables, rotation. Computed on the CPU, so that every
device gets the same bits. Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding,
arXiv 2104.09864, section 3.4.2.

The layout is that of the Hugging Face weights: a head's first half is rotated against its second.
Shapes: B batch, H heads, T time, D width of a head.
"""

import math

import torch
from torch import Tensor

from model_check.config.schema import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]; bit for bit what transformers
    computes."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / theta**exponents
    return frequencies if scaling is None else _stretch(frequencies, scaling)


def rope_tables(frequencies: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, D], for positions 0 to context_length - 1."""
    positions = torch.arange(context_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()


def positions_within(documents_BT: Tensor) -> Tensor:
    """int64 [B, T]: each position counted from the start of its document."""
    positions_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_BT = torch.where(begins_BT, positions_T, 0).cummax(dim=1).values
    return positions_T - starts_BT


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair by its position's angle, in the tables' precision; the dtype of x stays."""
    first, second = x_BHTD.chunk(2, dim=-1)
    quarter_turn = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos_TD + quarter_turn * sin_TD).to(x_BHTD.dtype)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_context_length
    wavelengths = 2 * math.pi / frequencies
    ramp = (original / wavelengths - low) / (high - low)  # 0 where stretched whole, 1 where kept
    blended = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    short_kept = torch.where(wavelengths < original / high, frequencies, blended)
    return torch.where(wavelengths > original / low, frequencies / scaling.factor, short_kept)
