"""Whether saved tensors are a model's."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from model_check.utils.words import few


def misfit(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Which tensors are missing, unexpected or of another shape, in one line; None: all fit."""
    kinds = {
        "missing": sorted(own.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - own.keys()),
        "of another shape": sorted(_reshaped(saved, own)),
    }
    return "; ".join(f"{few(names)} {what}" for what, names in kinds.items() if names) or None


def _reshaped(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[str]:
    for name in own.keys() & saved.keys():
        if own[name].shape != saved[name].shape:
            yield f"{name} {list(saved[name].shape)} (here {list(own[name].shape)})"
