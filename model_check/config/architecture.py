"""Which model a set of weights belongs to, as far as the shapes of its tensors do not tell: other
heads, rotary bases or norms compute other numbers from the same weights. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from model_check.config.schema import ModelSettings
from model_check.errors import ConfigError

KEYS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rms_norm_eps",
    "tie_word_embeddings",
)
"""The keys of [model] that the function of the weights depends on; the others say where weights and
tokenizer come from, how weights begin, and which kernel computes."""


class Difference(NamedTuple):
    """One key of [model] with two values, as they are given."""

    key: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.key} {self.ours} here, {self.theirs} there"


def differences(weights_of: Mapping[str, Any], model: ModelSettings) -> list[Difference]:
    """Where `weights_of`, the [model] that weights were trained with, is not the model `model`.

    A key that it lacks had its default. A vocabulary of null is the tokenizer's: the shape of the
    embedding tells. Raises ConfigError.
    """
    theirs, ours = _complete(weights_of), _complete(msgspec.to_builtins(model))
    if None in (theirs["vocab_size"], ours["vocab_size"]):
        theirs["vocab_size"] = ours["vocab_size"]
    return [Difference(key, theirs[key], ours[key]) for key in KEYS if theirs[key] != ours[key]]


def _complete(model: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults, and the width of a head. Raises ConfigError: no model has such values."""
    try:
        known = msgspec.convert({key: model[key] for key in KEYS if key in model}, ModelSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the [model] settings of these weights are damaged: {error}") from error
    values: dict[str, Any] = msgspec.to_builtins(known)
    values["head_dim"] = known.head_dim or known.hidden_size // known.num_heads
    return values
