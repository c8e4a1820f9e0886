"""What a worker tells of itself where its training begins."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from model_check.instrument.update import device_of, parameters_of

_LONGEST = 120
"""Characters of the settings that are told."""


def described(first: Optimizer, optimizers: Sequence[Optimizer], kernel: str) -> dict[str, Any]:
    """Returns the detail of its phase `build`. `first`: the optimizer that steps first; `kernel`:
    what takes its fingerprints."""
    device, parameters = device_of(first), parameters_of(first)
    on_gpu = device.type == "cuda"
    detail = {
        "device_name": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "num_threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fingerprints": f"{'full' if kernel == 'c' else 'rotate'}, {kernel}",
        "optimizer": ", ".join(type(each).__name__ for each in optimizers),
        "settings": _settings_of(optimizers),
        "parameters": _parameters_of(optimizers),
    }
    return {key: value for key, value in detail.items() if value is not None}


def _settings_of(optimizers: Sequence[Optimizer]) -> str:
    """Returns a digest of how they update, and for people what is on: of groups that are alike
    one."""
    groups = [_plain(group) for optimizer in optimizers for group in optimizer.param_groups]
    text = "; ".join(dict.fromkeys(map(_words_of, groups)))
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{_digest(repr(groups))}: {text}"


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    is_plain = (type(None), int, float, str, tuple)
    return {name: value for name, value in sorted(group.items()) if isinstance(value, is_plain)}


def _words_of(group: Mapping[str, Any]) -> str:
    """`lr 0.1, momentum 0.9`"""
    words = [f"{name} {value}" for name, value in group.items() if value]
    return ", ".join(sorted(words, key=lambda word: not word.startswith("lr ")))


def _parameters_of(optimizers: Sequence[Optimizer]) -> str:
    """Returns how many, and a digest of their shapes, types and groups as they follow each other:
    one that keeps them in a set may have others first in each process."""
    of_groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    shapes = [[None if is_lazy(p) else (*p.shape, p.dtype) for p in group] for group in of_groups]
    num = sum(map(len, of_groups))
    num_values = sum(p.numel() for group in of_groups for p in group if not is_lazy(p))
    return f"{_digest(repr(shapes))}: {num} of {num_values:,} values, as they follow each other"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
