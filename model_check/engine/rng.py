"""Every random state that a training step could draw from. Checkpoints hold them, a resumed run
gets them back, and evaluation leaves them as they were."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """The same start for all code that draws without a generator of its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes no more
    torch.manual_seed(seed % 2**63)  # of every GPU, too


def rng_states() -> dict[str, Any]:
    """Of python, numpy, torch's CPU and the GPU that this process uses; tensors and plain types."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": [version, list(internal), gauss],
        "numpy": numpy_state | {"state": {"key": keys, "pos": numpy_state["state"]["pos"]}},
        "torch": torch.get_rng_state(),
        # Only this GPU: a query of the others would make a context on each.
        "cuda": [torch.cuda.get_rng_state()] if on_gpu else [],
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what `rng_states` gave, a GPU's where one is used."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    key, position = states["numpy"]["state"]["key"], states["numpy"]["state"]["pos"]
    keys = key.numpy().astype(np.uint32)
    # The libraries do not check these, and numpy would read behind its keys.
    normals = (0.0 if gauss is None else gauss, states["numpy"]["gauss"])
    if not (0 <= position <= len(keys) and all(map(math.isfinite, normals))):
        raise ValueError(f"position {position} of {len(keys)}, next normals {normals}")
    if states["numpy"]["has_gauss"] not in (0, 1):
        raise ValueError("has_gauss is neither 0 nor 1")
    np.random.set_state(states["numpy"] | {"state": {"key": keys, "pos": position}})
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"][0])


def put_back(states: dict[str, Any]) -> dict[str, Any]:
    """What `rng_states` gives after `states` were set. The present states stay. Raises whatever the
    libraries raise for states that are none."""
    with kept_rng():
        set_rng_states(states)
        return rng_states()


@contextmanager
def kept_rng() -> Iterator[None]:
    """Put the random states back at the end: draws inside leave no trace."""
    states = rng_states()
    try:
        yield
    finally:
        set_rng_states(states)
