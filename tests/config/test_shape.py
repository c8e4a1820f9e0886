"""The table of the model's parameters is the model: names, sizes, order, counts, first values."""

import math
from typing import Any, get_args

import msgspec
import pytest
import torch

from model_check.attention import eager
from model_check.config.attention import KINDS, AttentionName
from model_check.config.parameter import Group
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import geometry, parameter, parameters
from model_check.init import build_model, empty_model
from model_check.model import Llama

TINY = {"hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "num_kv_heads": 1}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "grouped heads": {**TINY, "num_layers": 3},
    "tied": {**TINY, "num_layers": 2, "tie_word_embeddings": True},
    "wide heads": {**TINY, "num_layers": 1, "head_dim": 10},
    "local": {**TINY, "num_layers": 2, "attention": "local"},
    "infini": {**TINY, "num_layers": 2, "attention": "infini"},
    "more than ten blocks": {**TINY, "num_layers": 12, "num_kv_heads": 2},
    "the default": {},
}


def meta_model(**changes: Any) -> tuple[Settings, Llama]:
    settings = Settings(model=msgspec.convert({"vocab_size": 64} | changes, ModelSettings))
    shape = geometry(settings.model, 64)
    return settings, empty_model(settings, shape, eager, torch.device("meta"))


def test_every_kind_of_attention_can_be_asked_for() -> None:
    assert tuple(KINDS) == get_args(AttentionName)


@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES)
def test_names_sizes_and_order_are_the_modules(changes: dict[str, Any]) -> None:
    settings, model = meta_model(**changes)
    shape = geometry(settings.model, 64)
    rows = parameters(shape)
    module = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(row.name, shape.sizes(row)) for row in rows] == module
    assert [parameter(row.name) for row in rows] == rows
    assert shape.num_parameters == sum(math.prod(size) for _, size in module)


@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES)
def test_what_multiplies_is_every_linear_layer_and_the_head(changes: dict[str, Any]) -> None:
    settings, model = meta_model(**changes)
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    tied = model.head_weight.numel() if model.args.tie_word_embeddings else 0
    assert geometry(settings.model, 64).num_multiplied == sum(linear) + tied


def test_first_values_and_decay_are_those_of_the_kind() -> None:
    settings, _ = meta_model(**GEOMETRIES["infini"])
    model = build_model(settings, geometry(settings.model, 64), eager, torch.device("cpu"))
    for name, value in model.named_parameters():
        row = parameter(name)
        initial = row.initial(settings.model)
        assert (row.group is Group.MATRIX) == (value.ndim == 2), name
        assert (row.group is Group.GATE) == name.endswith("gate"), name
        if initial is None:
            assert len(value.unique()) > value.numel() / 2, name
        else:
            assert torch.equal(value, torch.full_like(value, initial)), name


def test_a_parameter_that_no_model_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        parameter("layers.0.attention.gate.weight")
