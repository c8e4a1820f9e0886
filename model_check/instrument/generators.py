"""The generators that every module of a process shares: what tells their states apart."""

import ctypes
import hashlib
import importlib
import random
import sys
from array import array
from contextlib import suppress
from typing import Any

import torch


def digests() -> dict[str, str]:
    """`rng.torch` -> 8 hex digits."""
    return {f"rng.{name}": _digest(name, state) for name, state in _states().items()}


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number % 2**63)
    with suppress(ImportError):
        import numpy.random

        numpy.random.seed(number % 2**32)


def _states() -> dict[str, Any]:
    """A GPU's only where one is used: to ask makes a context."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if (numpy := _numpy()) is not None:
        found["numpy"] = numpy.random.get_state()
    return found


def _numpy() -> Any:
    """None: the process has not imported it, so nothing draws from it."""
    if (numpy := sys.modules.get("numpy")) is not None:
        importlib.import_module("numpy.random")  # it comes when it is asked for
    return numpy


def _digest(name: str, state: Any) -> str:
    if name == "python":
        content = array("L", state[1]).tobytes() + repr(state[2]).encode()
    elif name == "numpy":
        content = state[1].tobytes() + repr(state[2:]).encode()
    else:
        content = ctypes.string_at(state.data_ptr(), state.numel())
    return hashlib.blake2b(content, digest_size=4).hexdigest()
