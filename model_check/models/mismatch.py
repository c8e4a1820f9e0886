"""Whether saved tensors are a model's. Pure."""

from collections.abc import Mapping, Sequence

from model_check.utils.words import few

Shapes = Mapping[str, Sequence[int]]


def mismatch(saved: Shapes, own: Shapes) -> str | None:
    """Which tensors are missing, unexpected or of another shape, in one line; None: all fit."""
    reshaped = [
        f"{name} {list(saved[name])} (here {list(own[name])})"
        for name in sorted(own.keys() & saved.keys())
        if list(saved[name]) != list(own[name])
    ]
    kinds = {
        "missing": sorted(own.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - own.keys()),
        "of another shape": reshaped,
    }
    return "; ".join(f"{few(names)} {what}" for what, names in kinds.items() if names) or None
