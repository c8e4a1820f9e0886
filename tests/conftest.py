"""Capabilities that a test asks for by a mark; without them it is skipped, and says so."""

import importlib.util

import pytest


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


CAPABILITIES = {
    "gpu": lambda: num_gpus() >= 1,
    "two_gpus": lambda: num_gpus() >= 2,
    "flash_attn": lambda: importlib.util.find_spec("flash_attn") is not None,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, present in CAPABILITIES.items():
        if item.get_closest_marker(name) and not present():
            pytest.skip(f"this machine has no {name}")
