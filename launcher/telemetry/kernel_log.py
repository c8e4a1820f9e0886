"""What the kernel log still holds against GPUs. NVML tells an Xid only while it is asked: one of
before a run would never be seen. Reads, and changes nothing."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from launcher.gpus.probe import Gpu
from launcher.telemetry.xids import FALLEN, HARMLESS, xid_symptom
from launcher.verdict.severity import Severity, Symptom

KERNEL_LOG = Path("/dev/kmsg")
UNLISTED = "a GPU that NVML does not list"
_RECORD_BYTES = 1 << 16
_ADDRESS = rb"([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)"
_XID = re.compile(rb"NVRM: Xid \(PCI:" + _ADDRESS + rb"[^)]*\): (\d+)")
_GONE = re.compile(
    rb"NVRM: (?:The NVIDIA )?GPU (?:at PCI:)?" + _ADDRESS
    # One message may be several lines: "installed in this system has", "fallen off the bus".
    + rb"(?:[^\n]|\n[^\n]*?NVRM:\s+(?=installed|fallen))*?(fallen off the bus|RmInitAdapter failed)"
)  # fmt: skip
_CURE = xid_symptom(FALLEN).cure
_SYMPTOMS = {
    b"fallen off the bus": Symptom(Severity.ISOLATE, "it has fallen off the bus", _CURE),
    b"RmInitAdapter failed": Symptom(Severity.ISOLATE, "the driver could not start it", _CURE),
}


class Logged(NamedTuple):
    """One thing that the kernel log tells of one GPU."""

    slot: tuple[int, ...]
    """PCI domain, bus, device."""
    symptom: Symptom
    is_gone: bool
    """The driver does not reach the GPU since then, unless it was started again."""

    @property
    def address(self) -> str:
        """`0000:1e:00`, as the kernel writes it."""
        return ":".join(f"{n:0{4 if at == 0 else 2}x}" for at, n in enumerate(self.slot))


def read_kernel_log(path: Path | None = None) -> list[Logged]:
    """Each thing of each GPU once; nothing where it may not be read. `path`: not KERNEL_LOG."""
    log = _read(path or KERNEL_LOG)
    xids = dict.fromkeys((_slot(bus.decode()), int(xid)) for bus, xid in _XID.findall(log))
    gone = dict.fromkeys((_slot(bus.decode()), what) for bus, what in _GONE.findall(log))
    found = [
        Logged(slot, xid_symptom(xid), xid == FALLEN) for slot, xid in xids if xid not in HARMLESS
    ]
    told = {each.slot for each in found if each.is_gone}
    return found + [Logged(slot, _SYMPTOMS[what], True) for slot, what in gone if slot not in told]


def against(gpus: Sequence[Gpu], logged: Sequence[Logged]) -> Iterator[tuple[Gpu, Symptom]]:
    for gpu in gpus:
        slot = _slot(gpu.pci_bus_id)
        yield from ((gpu, each.symptom) for each in logged if each.slot == slot)


def unlisted(gpus: Sequence[Gpu], logged: Sequence[Logged]) -> list[Logged]:
    """Of GPUs that are none of `gpus`, all that NVML lists: it counts none that is lost."""
    listed = {_slot(gpu.pci_bus_id) for gpu in gpus}
    return [each for each in logged if each.slot not in listed]


def _read(path: Path) -> bytes:
    """All that is there now. One read of /dev/kmsg gives one record."""
    records = []
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError), os.fdopen(fd, "rb", buffering=0) as file:
            while record := file.read(_RECORD_BYTES):
                records.append(record)
    return b"".join(records)


def _slot(bus_id: str) -> tuple[int, ...]:
    """Domain, bus and device: NVML writes 00000000:1B:00.0, the kernel 0000:1b:00."""
    return tuple(int(part.partition(".")[0], 16) for part in bus_id.split(":") if part)
