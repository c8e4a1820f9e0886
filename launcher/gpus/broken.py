"""Which GPUs that cannot answer a run would have used. Pure.

One lost GPU must not keep a run from the others that were asked for; nor may a run of all GPUs pass
a box that has lost one.
"""

import re
from collections.abc import Sequence

from launcher.gpus.choose import auto_count
from launcher.gpus.probe import BrokenGpu, Gpu, Snapshot
from launcher.gpus.visible import mig_devices, names_in


def broken_needed(
    selector: str, expect_gpus: int | None, mask: str | None, snapshot: Snapshot
) -> list[BrokenGpu]:
    """Those of `snapshot.broken` that a run is refused for. `expect_gpus` says how many are all."""
    if selector.strip() == "all" and expect_gpus is not None:
        return []
    return broken_wanted(selector, mask, snapshot)


def broken_wanted(selector: str, mask: str | None, snapshot: Snapshot) -> list[BrokenGpu]:
    """Those of `snapshot.broken` that `selector` names under CUDA_VISIBLE_DEVICES=`mask`.

    The UUID of a broken GPU is unknown: a UUID that no other GPU has may be any of them. `auto`
    names none: it takes the best of those that work.
    """
    if not snapshot.broken or auto_count(selector) is not None:
        return []
    value = mask if selector.strip() == "all" else selector
    if value is None:
        return list(snapshot.broken)
    if value.upper().startswith(("GPU-", "MIG-")) or selector.strip() != "all":
        tokens = [token.strip() for token in value.split(",")]
        indices = {int(token) for token in tokens if re.fullmatch(r"[0-9]+", token)}
        if any(_is_nobodys(token, snapshot.gpus) for token in tokens):
            return list(snapshot.broken)
    else:
        indices = {int(name) for name in names_in(value)[0]}
    return [gpu for gpu in snapshot.broken if gpu.index in indices]


def _is_nobodys(token: str, gpus: Sequence[Gpu]) -> bool:
    """Whether it is the UUID prefix of no GPU that works."""
    if not token.upper().startswith(("GPU-", "MIG-")):
        return False
    devices = [*gpus, *mig_devices(gpus)]
    return not any(device.uuid.lower().startswith(token.lower()) for device in devices)
