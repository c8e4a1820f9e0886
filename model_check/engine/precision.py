"""Which dtype the matrix products use. Weights, gradients and moments are float32 always."""

from contextlib import AbstractContextManager, nullcontext

import torch

from model_check.errors import ConfigError


def compute_dtype(use_amp: bool, device: torch.device) -> torch.dtype:
    """The products' dtype. Raises ConfigError where bfloat16 was asked for and is only emulated."""
    if not use_amp:
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"training.use_amp = true: {torch.cuda.get_device_name(device)} has no bfloat16; set "
            "training.use_amp=false"
        )
    return torch.bfloat16


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """The context of a forward pass. No loss scaling: bfloat16 has float32's range."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
