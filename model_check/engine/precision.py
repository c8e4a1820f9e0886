"""Which dtype matrix products use. Weights, gradients and moments are always float32."""

import torch

from model_check.config.precision import precision
from model_check.config.schema import TrainingSettings
from model_check.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compute_dtype(training: TrainingSettings, device: torch.device) -> torch.dtype:
    """The products' dtype. Raises ConfigError where bfloat16 was asked for and is only emulated."""
    dtype = _DTYPES[precision(training)]
    emulated = dtype == torch.bfloat16 and device.type == "cuda"
    if emulated and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"training.use_amp = true: {torch.cuda.get_device_name(device)} has no bfloat16; set "
            "training.precision=fp16 or training.use_amp=false"
        )
    return dtype
