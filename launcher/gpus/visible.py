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

from launcher.gpus.probe import Gpu


def visible(gpus: Sequence[Gpu], value: str | None) -> list[Gpu]:
    """The devices that CUDA_VISIBLE_DEVICES=`value` leaves (None: unset), in its order.

    GPUs in MIG mode are replaced by their instances; one without instances stays, unusable.
    """
    if value is None:
        named = list(gpus)
    elif value.startswith("GPU-"):
        named = _by_uuid(gpus, _tokens_with(value, "GPU-"))
    elif value.startswith("MIG-"):
        named = _by_uuid(mig_devices(gpus), _tokens_with(value, "MIG-"))
    else:
        named = _by_number(gpus, value)
    return [device for gpu in named for device in pinnable(gpu)]


def pinnable(gpu: Gpu) -> tuple[Gpu, ...]:
    """What a process can be pinned to: the GPU, or its MIG instances where it has some."""
    return gpu.mig_devices or (gpu,)


def mig_devices(gpus: Sequence[Gpu]) -> list[Gpu]:
    return [device for gpu in gpus for device in gpu.mig_devices]


def order_note(gpus: Sequence[Gpu], value: str | None, device_order: str | None) -> str | None:
    """A line for a person when the numbers in CUDA_VISIBLE_DEVICES could mean other GPUs to CUDA.

    `device_order`: what CUDA_DEVICE_ORDER says.
    """
    numbers = value is not None and not value.startswith(("GPU-", "MIG-")) and visible(gpus, value)
    models = sorted({gpu.name for gpu in gpus})
    if not numbers or device_order == "PCI_BUS_ID" or len(models) < 2:
        return None
    return (
        f"the numbers in CUDA_VISIBLE_DEVICES={value!r} are read in PCI bus order, as nvidia-smi "
        f"counts; CUDA by itself counts the fastest GPU first, and the models here differ "
        f"({', '.join(models)}): set CUDA_DEVICE_ORDER=PCI_BUS_ID, or give UUIDs"
    )


def _tokens_with(value: str, prefix: str) -> list[str]:
    """The tokens up to the first one of another kind; none when one is given twice."""
    tokens: list[str] = []
    for token in value.split(","):
        if token in tokens:
            return []
        if not token.startswith(prefix):
            break
        tokens.append(token)
    return tokens


def _by_uuid(devices: Sequence[Gpu], prefixes: Sequence[str]) -> list[Gpu]:
    """Each prefix's device, up to the first unknown or ambiguous one; none when one comes twice."""
    found: list[Gpu] = []
    for prefix in prefixes:
        matches = [device for device in devices if device.uuid.startswith(prefix)]
        if len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found.append(matches[0])
    return found


def _by_number(gpus: Sequence[Gpu], value: str) -> list[Gpu]:
    numbers = numbers_in(value)
    by_index = {gpu.index: gpu for gpu in gpus}
    found: list[Gpu] = []
    for number in numbers:
        if number not in by_index:
            break
        found.append(by_index[number])
    return found


def numbers_in(value: str) -> list[int]:
    """The numbers up to the first token of another kind; none when one is given twice. Read as
    `strtoul` does: digits count until something else comes (`2ampere` is 2)."""
    numbers: list[int] = []
    for token in value.split(","):
        digits = re.match(r"[+-]?[0-9]+", token.strip())
        number = int(digits.group()) if digits else -1
        if number in numbers:
            return []
        if number < 0:
            break
        numbers.append(number)
    return numbers
