"""Which GPUs that cannot answer a run would have used. Pure.

One lost GPU must not keep a run from the others that were asked for; nor may a run of all GPUs pass
a box that has lost one.
"""

from collections.abc import Sequence

from launcher.gpus.choose import auto_count
from launcher.gpus.probe import BrokenGpu, Gpu, Snapshot
from launcher.gpus.visible import UUID_KINDS, mig_devices, names_in


def broken_needed(
    selector: str, expect_gpus: int | None, mask: str | None, snapshot: Snapshot
) -> list[BrokenGpu]:
    """The GPUs of `snapshot.broken` that `selector` names under CUDA_VISIBLE_DEVICES=`mask`: a run
    is refused for them. `expect_gpus`: how many are all; with it `all` needs no broken one.

    The UUID of a broken GPU is unknown: a UUID that no other GPU has may be any of them. `auto`
    needs none: it takes the best of those that work.
    """
    is_all = selector.strip() == "all"
    if auto_count(selector) is not None or (is_all and expect_gpus is not None):
        return []
    value = mask if is_all else selector
    if value is None:
        return list(snapshot.broken)
    if is_all and not value.upper().startswith(UUID_KINDS):
        names = names_in(value)[0]
    else:
        names = [name.strip() for name in value.split(",")]
    if any(_is_unknown_uuid(name, snapshot.gpus) for name in names):
        return list(snapshot.broken)
    indices = {int(name) for name in names if name.isdecimal()}
    return [gpu for gpu in snapshot.broken if gpu.index in indices]


def _is_unknown_uuid(name: str, gpus: Sequence[Gpu]) -> bool:
    """Whether it is the UUID prefix of no GPU that works."""
    if not name.upper().startswith(UUID_KINDS):
        return False
    devices = [*gpus, *mig_devices(gpus)]
    return not any(device.uuid.lower().startswith(name.lower()) for device in devices)
