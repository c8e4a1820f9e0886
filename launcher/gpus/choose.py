"""Which of the visible GPUs a run takes, and which broken ones it would have taken. Pure: reserves
nothing, asks no driver."""

import re
from collections.abc import Callable, Sequence

from launcher.gpus.probe import BrokenGpu, Gpu, Snapshot
from launcher.gpus.visible import UUID_KINDS, inventory, mig_devices, names_in, pinnable
from model_check.errors import NoGpuError, UsageError

GRAMMAR = "all | auto | auto:N | 0,2,5 | GPU-<uuid prefix>[,...] | MIG-<uuid prefix>[,...]"
BUSY_MIB = 1024
"""More memory in use than this means that a program works there, where the driver's own share is
counted as used."""
HIDDEN_MIB = 128
"""The same where it is not: a display server stays below it, a CUDA context does not."""
BUSY_PERCENT = 10
"""A GPU that works so much of the last moments works for somebody."""


def choose(selector: str, visible: Sequence[Gpu], physical: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that `selector` (see GRAMMAR) names, in its order; `auto` in PCI order.

    `visible`: what CUDA_VISIBLE_DEVICES leaves; `physical`: the whole machine. Numbers are physical
    indices. Raises UsageError for a selector that makes no sense, NoGpuError for a GPU that is
    missing, hidden or not usable.
    """
    check_selector(selector)
    count = auto_count(selector)
    if count is not None:
        return freest(count, visible)
    if not visible:
        hidden = f"CUDA_VISIBLE_DEVICES hides every GPU; {inventory(physical)}"
        raise NoGpuError(hidden if physical else "no GPU found")
    chosen = list(visible) if selector.strip() == "all" else _named(selector, visible, physical)
    for gpu in chosen:
        if why := why_unusable(gpu):
            raise NoGpuError(f"{gpu.title} {why}; choose others with --gpus")
    return chosen


def broken_needed(
    selector: str, expect_gpus: int | None, mask: str | None, snapshot: Snapshot
) -> list[BrokenGpu]:
    """The GPUs of `snapshot.broken` that `selector` names under CUDA_VISIBLE_DEVICES=`mask`: a run
    is refused for them. `expect_gpus`: how many are all; with it `all` needs no broken one.

    One lost GPU must not keep a run from the others that were asked for; nor may a run of all GPUs
    pass a box that has lost one. The UUID of a broken GPU is unknown: a UUID that no other GPU has
    may be any of them. `auto` needs none: it takes the best of those that work.
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
    working = [*snapshot.gpus, *mig_devices(snapshot.gpus)]
    uuids = [name for name in names if name.upper().startswith(UUID_KINDS)]
    if not all(_starting_with(uuid, working) for uuid in uuids):
        return list(snapshot.broken)
    indices = {int(name) for name in names if name.isdecimal()}
    return [gpu for gpu in snapshot.broken if gpu.index in indices]


def check_selector(selector: str) -> None:
    """Raises UsageError for a selector that has no meaning on any machine."""
    if auto_count(selector) is not None or selector.strip() == "all":
        return
    for token in (part.strip() for part in selector.split(",")):
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-.*", token, re.IGNORECASE):
            raise UsageError(f"--gpus {selector}: {token!r} is not a GPU: {GRAMMAR}")


def auto_count(selector: str) -> int | None:
    """How many GPUs `auto` or `auto:N` asks for; None for any other selector. Raises UsageError."""
    word, colon, number = selector.strip().partition(":")
    if word != "auto":
        return None
    if not colon:
        return 1
    if not re.fullmatch(r"[0-9]+", number) or int(number) == 0:
        raise UsageError(f"--gpus {selector}: auto:N needs a count from 1 on ({GRAMMAR})")
    return int(number)


def freest(
    count: int, seen: Sequence[Gpu], holder_of: Callable[[Gpu], str | None] = lambda gpu: None
) -> list[Gpu]:
    """So many GPUs, the freest that no other launcher holds, in PCI order.

    `holder_of` is asked in the order of the ranking, until there are enough. Raises NoGpuError.
    """
    ranked = rank_free(seen)
    if len(ranked) < count:
        reasons = [f"{gpu.title} {why}" for gpu in seen if (why := why_unusable(gpu))]
        text = f"--gpus auto: {count} wanted, {len(ranked)} usable of {len(seen)} visible"
        raise NoGpuError("; ".join([text, *reasons]))
    free: list[Gpu] = []
    reserved: list[str] = []
    for gpu in ranked:
        if holder := holder_of(gpu):
            reserved.append(f"{gpu.title} is reserved by {holder}")
        else:
            free.append(gpu)
        if len(free) == count:
            return sorted(free, key=_position)
    raise NoGpuError(f"--gpus auto: {count} wanted, {len(free)} free; {'; '.join(reserved)}")


def rank_free(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The usable GPUs, freest first.

    Idle before busy, then lowest utilisation, most free memory, coolest, lowest index. A GPU that
    holds 30 GiB at 0 % is busy: it waits for its next batch.
    """
    return sorted((gpu for gpu in gpus if why_unusable(gpu) is None), key=_rank)


def why_unusable(gpu: Gpu) -> str | None:
    """Why no process can use this GPU at all; None when one can."""
    if gpu.mig_enabled:
        return "has MIG enabled and no instance (nvidia-smi mig -cgi ... -C makes some)"
    if gpu.compute_mode == "prohibited":
        index = gpu.index
        return f"is in compute mode 'prohibited' (nvidia-smi -i {index} -c DEFAULT changes that)"
    if gpu.compute_mode in ("exclusive_process", "exclusive_thread") and gpu.processes:
        return f"is in compute mode 'exclusive' and taken by pid {gpu.processes[0].pid}"
    return None


def why_busy(gpu: Gpu) -> str | None:
    """Which processes work on this GPU (`pid 4711 holds 30.0 GiB`); None when it is idle."""
    if gpu.processes:
        return ", ".join(
            f"pid {pid} holds {'an unknown amount' if mib is None else _gib(mib)}"
            for pid, mib in gpu.processes
        )
    # In a container the driver may hide the processes of other pid namespaces.
    hidden = "by graphics or by processes not seen from here"
    if (gpu.used_mib or 0) > (BUSY_MIB if gpu.reserved_mib is None else HIDDEN_MIB):
        return f"{_gib(gpu.used_mib)} held {hidden}"
    if (gpu.utilization_percent or 0) >= BUSY_PERCENT:
        return f"{gpu.utilization_percent} % used {hidden}"
    return None


def why_not_idle(gpu: Gpu) -> str | None:
    """Why this GPU may not count as idle: somebody works there, or it does not tell. None: idle."""
    if busy := why_busy(gpu):
        return f"{gpu.label} is busy: {busy}"
    if gpu.processes is None and None in (gpu.used_mib, gpu.utilization_percent):
        return f"{gpu.label} does not tell who uses it: whether it is idle is not known"
    return None


def describe_choices(chosen: Sequence[Gpu], seen: Sequence[Gpu]) -> list[str]:
    """`Using GPU 3 (lowest utilization): 0 % used, 79.1 GiB free`, and which processes share a busy
    one, of each that `auto` chose among the visible ones."""
    uuids = {gpu.uuid for gpu in chosen}
    others = [gpu for gpu in seen if gpu.uuid not in uuids]
    return [_describe_choice(gpu, others) for gpu in chosen]


def _describe_choice(gpu: Gpu, others: Sequence[Gpu]) -> str:
    name, percent, busy = (
        gpu.label.replace("GPU", "GPU ", 1),
        gpu.utilization_percent,
        why_busy(gpu),
    )
    why, used = "", "N/A"
    if percent is not None:
        known = [p for other in others if (p := other.utilization_percent) is not None]
        is_lowest = percent <= min(known, default=percent)
        # One that works less is busy by its memory, not usable, or reserved by another launcher.
        true = "lowest utilization" if is_lowest else "freest" if busy else "idle"
        why, used = f" ({true})", f"{percent} %"
    shared = f"; busy: {busy}" if busy else ""
    return f"Using {name}{why}: {used} used, {_gib(gpu.free_mib)} free{shared}"


def _rank(gpu: Gpu) -> tuple[bool, float, float, float, int, int]:
    # The driver itself takes a few MiB more or less: they must not outweigh heat.
    unknown = float("inf")
    free_mib = gpu.free_mib
    if free_mib is not None and gpu.used_mib is not None:
        free_mib += gpu.used_mib % BUSY_MIB
    return (
        why_busy(gpu) is not None,
        unknown if gpu.utilization_percent is None else gpu.utilization_percent,
        unknown if free_mib is None else -free_mib,
        unknown if gpu.temperature_c is None else gpu.temperature_c,
        *_position(gpu),
    )


def _position(gpu: Gpu) -> tuple[int, int]:
    return gpu.index, -1 if gpu.mig_index is None else gpu.mig_index


def _named(selector: str, visible: Sequence[Gpu], physical: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for token in (part.strip() for part in selector.split(",")):
        for gpu in _resolve(token, selector, physical):
            if gpu.uuid not in {seen.uuid for seen in visible}:
                raise NoGpuError(
                    f"--gpus {selector}: {gpu.title} is hidden by CUDA_VISIBLE_DEVICES; "
                    f"{inventory(visible)}"
                )
            if gpu in chosen:
                raise UsageError(f"--gpus {selector}: {gpu.title} is given twice")
            chosen.append(gpu)
    return chosen


def _resolve(token: str, selector: str, physical: Sequence[Gpu]) -> list[Gpu]:
    """The devices that one token names, visible or not."""
    if re.fullmatch(r"[0-9]+", token):
        matches = [gpu for gpu in physical if gpu.index == int(token)]
    elif token.upper().startswith("GPU-"):
        matches = _starting_with(token, physical)
    else:
        matches = _starting_with(token, mig_devices(physical))
    if len(matches) > 1:
        names = ", ".join(f"{gpu.index}: {gpu.uuid}" for gpu in matches)
        raise UsageError(f"--gpus {selector}: {token} is ambiguous: {names}")
    if not matches:
        raise NoGpuError(f"--gpus {selector}: there is no GPU {token}; {inventory(physical)}")
    return pinnable(matches)


def _starting_with(token: str, devices: Sequence[Gpu]) -> list[Gpu]:
    return [device for device in devices if device.uuid.lower().startswith(token.lower())]


def _gib(mib: int | None) -> str:
    return "N/A" if mib is None else f"{mib / 1024:.1f} GiB"
