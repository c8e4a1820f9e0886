"""The dtype of matrix products, from the two settings that decide it. Pure."""

from typing import Literal

from model_check.config.schema import TrainingSettings

Precision = Literal["bf16", "fp16", "fp32"]

_SHORT: dict[str, Precision] = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}


def precision(training: TrainingSettings) -> Precision:
    """training.precision, else what training.use_amp means."""
    if training.precision is not None:
        return _SHORT[training.precision]
    return "bf16" if training.use_amp else "fp32"
