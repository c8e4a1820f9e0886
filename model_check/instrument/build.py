"""What a worker tells of itself where its training begins."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from model_check.instrument.update import device_of, parameters_of


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
        "settings": _digest_of(optimizers),
    }
    return {key: value for key, value in detail.items() if value is not None}


def _digest_of(optimizers: Sequence[Optimizer]) -> str:
    """What decides the steps, as far as it shows: shapes, and how they are updated."""
    digest = hashlib.blake2b(digest_size=8)
    for optimizer in optimizers:
        digest.update(type(optimizer).__name__.encode())
        for group in optimizer.param_groups:
            plain = {k: v for k, v in sorted(group.items()) if _is_plain(v)}
            shapes = [(tuple(p.shape), str(p.dtype)) for p in group["params"]]
            digest.update(repr((plain, shapes)).encode())
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, int | float | str | tuple)
