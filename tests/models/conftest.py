"""Tiny models, built as the trainer builds them."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from model_check.attention import eager
from model_check.config.schema import ModelSettings, Settings, SystemSettings, TrainingSettings
from model_check.config.shape import geometry
from model_check.init import build_model
from model_check.model import Llama

TINY = ModelSettings(
    num_layers=2,
    hidden_size=64,
    intermediate_size=172,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=257,
)


@pytest.fixture
def settings() -> Callable[..., Settings]:
    def make(*, training: dict[str, Any] | None = None, seed: int = 42, **model: Any) -> Settings:
        return Settings(
            model=msgspec.structs.replace(TINY, **model),
            training=TrainingSettings(**{"context_length": 64, **(training or {})}),
            system=SystemSettings(seed=seed),
        )

    return make


@pytest.fixture
def tiny(settings: Callable[..., Settings]) -> Callable[..., Llama]:
    def make(attend: Any = eager, **changes: Any) -> Llama:
        wanted = settings(**changes)
        return build_model(wanted, geometry(wanted.model, 257), attend, torch.device("cpu"))

    return make
