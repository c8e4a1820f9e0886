"""The launcher knows the model's parameters by name, without torch."""

import msgspec
import pytest
import torch

from model_check.config.derived import geometry
from model_check.config.drill import parameter_names
from model_check.config.schema import ModelSettings, Settings
from model_check.models.attention import eager
from model_check.models.build_model import empty_model


@pytest.mark.parametrize("tied", [False, True])
def test_the_names_of_parameters_are_the_models_own(tied: bool) -> None:
    tiny = {"num_layers": 3, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 64}
    settings = Settings(model=msgspec.convert(tiny | {"tie_word_embeddings": tied}, ModelSettings))
    shape = geometry(settings.model, 64)
    model = empty_model(settings, shape, eager, torch.device("meta"))
    expected = {name for name, _ in model.named_parameters()}
    assert set(parameter_names(3, tied=tied)) == expected
