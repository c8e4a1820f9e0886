"""Which production preset a run takes that names none: one for all its GPUs, by the memory that the
smallest of them has. Pure.

What is free at the moment decides nothing: the same command on the same GPUs trains the same model.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from launcher.gpus.probe import Gpu
from model_check.config.load import Loaded, Request, load

PRODUCTION = "production"
SISTERS = (("production-medium", 22.0), ("production-small", 0.0))
"""For GPUs with less than FULL_GIB, each with the least memory that it is for."""
FULL_GIB = 44.0
"""What `production` is for: it takes about 35 GiB, and an estimate may be a fifth too low."""


def memory_gib(gpus: Iterable[Gpu]) -> list[float]:
    """The memory of those that tell it."""
    return [gpu.total_mib / 1024 for gpu in gpus if gpu.total_mib]


def fitted(
    loaded: Loaded, request: Request, totals_gib: Iterable[float]
) -> tuple[Loaded, list[str]]:
    """The settings for GPUs with so much memory, and a line for a person where they are a smaller
    sister's. The same settings where a preset was named, no GPU tells its memory, or nothing would
    change."""
    smallest_gib = min(totals_gib, default=FULL_GIB)
    if loaded.preset != PRODUCTION or request.preset or smallest_gib >= FULL_GIB:
        return loaded, []
    preset = next(name for name, least_gib in SISTERS if smallest_gib >= least_gib)
    smaller = load(replace(request, preset=preset), lambda: True)
    if smaller.settings == loaded.settings:
        return loaded, []
    return smaller, [
        f"preset {preset}: the smallest GPU taken has {smallest_gib:.1f} GiB, and production is "
        f"for {FULL_GIB:g} GiB or more (--preset chooses)"
    ]
