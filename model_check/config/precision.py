"""The dtype of matrix products, from the two settings that name it. Pure."""

from collections.abc import Mapping
from typing import Literal

from model_check.config.schema import TrainingSettings
from model_check.errors import ConfigError

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


def check_precision(training: TrainingSettings, sources: Mapping[str, str]) -> None:
    """Raises ConfigError when a person gave both, and they disagree."""
    name = "training.use_amp"
    given = not sources.get(name, "default").startswith(("default", "preset"))
    if given and training.use_amp is (precision(training) == "fp32"):
        raise ConfigError(
            f"{sources[name]}: {name} = {str(training.use_amp).lower()} contradicts "
            f"training.precision = {training.precision}: give one of the two"
        )
