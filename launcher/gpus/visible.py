"""What CUDA_VISIBLE_DEVICES leaves of the machine's GPUs. Pure.

CUDA itself is never asked (it would open a context); its grammar is read here, and held by a test
against the reading of torch. Two things differ from what one CUDA process would see, on purpose:

- Numbers are read in PCI bus order, as NVML and nvidia-smi count and as
  CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count. CUDA's own default is fastest first, which is the
  same order when all GPUs are of one model; `order_note` tells when it may not be.
- One CUDA process uses one MIG instance, the first it may. The launcher gives each instance a
  process of its own, so a GPU in MIG mode stands for all its instances.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from launcher.gpus.probe import Gpu

UUID_KINDS = ("GPU-", "MIG-")


class Mask(Struct, frozen=True):
    """What CUDA_VISIBLE_DEVICES leaves of the machine's GPUs."""

    devices: list[Gpu]
    """In its order. The instances of a GPU in MIG mode stand in its place; one without instances
    stays, unusable."""
    lacks: str | None = None
    """What it names and does not get, and why; None: it gets all that it names."""
    ignores: str | None = None
    """The part of it that CUDA does not read, and why."""


def read_mask(gpus: Sequence[Gpu], value: str | None) -> Mask:
    """`value`: CUDA_VISIBLE_DEVICES; None: it is unset."""
    if value is None:
        return Mask(pinnable(gpus))
    names, rest = names_in(value)
    found: list[Gpu] = []
    lacks = _twice(names)
    for name in [] if lacks else names:
        matches = _matches(name, gpus)
        if len(matches) != 1:  # CUDA stops here
            lacks = _lacks(names[names.index(name) :], gpus)
            break
        if matches[0] in found:
            found, lacks = [], _twice([name, name])
            break
        found.append(matches[0])
    unread = None if lacks else _unread(rest)
    says, lacks = f"CUDA_VISIBLE_DEVICES={value!r}", lacks or unread
    ignored = None if unread else _ignored(names, rest)
    return Mask(
        pinnable(found),
        f"{says} names {lacks}" if lacks else None,
        f"{says}: {ignored}" if ignored else None,
    )


def visible(gpus: Sequence[Gpu], value: str | None) -> list[Gpu]:
    """The devices that CUDA_VISIBLE_DEVICES=`value` leaves (None: unset), in its order."""
    return read_mask(gpus, value).devices


def inventory(gpus: Sequence[Gpu]) -> str:
    """The GPUs, for a message: `there are 0 (GPU-5d1c92ab), 1 (GPU-77aa0b1c)`."""
    num = len(pinnable(gpus))
    return f"there {'is' if num == 1 else 'are'} {titles(gpus)}" if num else "there is none"


def titles(gpus: Sequence[Gpu]) -> str:
    """`0 (GPU-5d1c92ab), 1 (GPU-77aa0b1c)`: each one, or its MIG instances."""
    return ", ".join(device.title.removeprefix("GPU ") for device in pinnable(gpus))


def pinnable(gpus: Sequence[Gpu]) -> list[Gpu]:
    """What processes can be pinned to: each GPU, or its MIG instances where it has some."""
    return [device for gpu in gpus for device in gpu.mig_devices or (gpu,)]


def mig_devices(gpus: Sequence[Gpu]) -> list[Gpu]:
    return [device for gpu in gpus for device in gpu.mig_devices]


def order_note(gpus: Sequence[Gpu], value: str | None, device_order: str | None) -> str | None:
    """A line for a person when the numbers in CUDA_VISIBLE_DEVICES could mean other GPUs to CUDA.

    `device_order`: what CUDA_DEVICE_ORDER says.
    """
    numbers = value is not None and not value.startswith(UUID_KINDS) and visible(gpus, value)
    models = sorted({gpu.name for gpu in gpus})
    if not numbers or device_order == "PCI_BUS_ID" or len(models) < 2:
        return None
    return (
        f"the numbers in CUDA_VISIBLE_DEVICES={value!r} are read in PCI bus order, as nvidia-smi "
        f"counts; CUDA by itself counts the fastest GPU first, and the models here differ "
        f"({', '.join(models)}): set CUDA_DEVICE_ORDER=PCI_BUS_ID, or give UUIDs"
    )


def names_in(value: str) -> tuple[list[str], list[str]]:
    """The tokens of CUDA_VISIBLE_DEVICES up to the first that is not of the first one's kind (UUID
    prefixes, or numbers in plain digits); and the rest, which CUDA does not read."""
    kind = next((kind for kind in UUID_KINDS if value.startswith(kind)), None)
    tokens = value.split(",")
    names: list[str] = []
    for token in tokens:
        name = _number(token) if kind is None else token if token.startswith(kind) else None
        if name is None:
            break
        names.append(name)
    return names, tokens[len(names) :]


def _number(token: str) -> str | None:
    """As `strtoul` reads it: digits count until something else comes (`2ampere` is 2)."""
    digits = re.match(r"[+-]?[0-9]+", token.strip())
    number = int(digits.group()) if digits else -1
    return None if number < 0 else str(number)


def _matches(name: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    if name.startswith("GPU-"):
        return [gpu for gpu in gpus if gpu.uuid.startswith(name)]
    if name.startswith("MIG-"):
        return [device for device in mig_devices(gpus) if device.uuid.startswith(name)]
    return [gpu for gpu in gpus if gpu.index == int(name)]


def _twice(names: Sequence[str]) -> str | None:
    twice = next((name for name in names if names.count(name) > 1), None)
    return None if twice is None else f"{_called(twice)} twice, and CUDA then sees no GPU"


def _lacks(names: Sequence[str], gpus: Sequence[Gpu]) -> str:
    """`names`: from the first one on that does not exist or is ambiguous; CUDA stops there."""
    first = _matches(names[0], gpus)
    if first:
        return f"{names[0]}, which fits several: {titles(first)}"
    missing = [name for name in names if not _matches(name, gpus)]
    after = [name for name in names if name not in missing]
    cut = f"; CUDA ignores what follows it ({','.join(after)})" if after else ""
    counted = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
    named = " and ".join(map(_called, missing))
    is_are = "is" if len(missing) == 1 else "are"
    return f"{named}, which {is_are} missing: NVML lists {counted}, {titles(gpus)}{cut}"


def _called(name: str) -> str:
    return f"GPU {name}" if name.isdigit() else name


def _unread(rest: Sequence[str]) -> str | None:
    """The UUIDs after a token that CUDA cannot read: the author of the mask wants those devices.
    After a terminator the author does not."""
    uuids = [token.strip() for token in rest if token.strip().startswith(UUID_KINDS)]
    if not uuids or _is_terminator(rest[0]):
        return None
    return f"{' and '.join(uuids)}, and CUDA {_stops_at(rest[0])}"


def _is_terminator(token: str) -> bool:
    return re.match(r"\s*-[0-9]", token) is not None


def _stops_at(token: str) -> str:
    return f"stops at {token!r}, which is no name of the first one's kind"


def _ignored(names: Sequence[str], rest: Sequence[str]) -> str | None:
    """What CUDA does not read. A value that begins with a terminator, or ends with a comma, is
    meant so."""
    if not names or not any(rest):
        return None
    if _is_terminator(rest[0]):
        after = ",".join(rest[1:])
        return f"CUDA ignores what follows {rest[0].strip()} ({after})" if after else None
    return f"CUDA {_stops_at(rest[0])}"
