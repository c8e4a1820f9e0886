"""Which model a set of weights belongs to. The shapes of tensors do not tell everything: with other
heads, rotary bases or norms the same weights compute other numbers. Pure."""

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
"""The keys of [model] that decide what the weights compute. The others say where weights and
tokenizer come from, how weights begin, and which kernel computes."""


class Difference(NamedTuple):
    """A key of [model] with its two values, as they were given."""

    key: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.key} {self.ours} here, {self.theirs} there"


def differences(weights_of: Mapping[str, Any], model: ModelSettings) -> list[Difference]:
    """Where `weights_of`, the [model] that weights were trained with, differs from `model`.

    A key that is missing had its default. A vocabulary of null is the tokenizer's, and the shape of
    the embedding is checked elsewhere. Raises ConfigError.
    """
    theirs, ours = _complete(weights_of), _complete(msgspec.to_builtins(model))
    if None in (theirs["vocab_size"], ours["vocab_size"]):
        theirs["vocab_size"] = ours["vocab_size"]
    return [Difference(key, theirs[key], ours[key]) for key in KEYS if theirs[key] != ours[key]]


def _complete(model: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults, and the width of a head. Raises ConfigError for values that no model can
    have."""
    try:
        known = msgspec.convert({key: model[key] for key in KEYS if key in model}, ModelSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the [model] settings of these weights are damaged: {error}") from error
    values: dict[str, Any] = msgspec.to_builtins(known)
    values["head_dim"] = known.head_dim or known.hidden_size // known.num_heads
    return values
