"""The Xids of GPUs that the kernel log still holds. NVML tells only those that come while it is
asked: one of before a run would never be seen. Reads, and changes nothing."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.gpus.probe import Gpu
from launcher.telemetry.xids import HARMLESS, xid_symptom
from launcher.verdict.severity import Symptom

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 1 << 16
_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")


def earlier_xids(gpus: Sequence[Gpu], path: Path = KERNEL_LOG) -> list[tuple[Gpu, Symptom]]:
    """Each Xid that the log has of each GPU, once; none where it may not be read."""
    slots = {gpu.uuid: _slot(gpu.pci_bus_id) for gpu in gpus}
    log = _read(path) if slots else b""
    found = dict.fromkeys((_slot(bus.decode()), int(xid)) for bus, xid in _XID.findall(log))
    return [
        (gpu, xid_symptom(xid))
        for gpu in gpus
        for slot, xid in found
        if slot == slots[gpu.uuid] and xid not in HARMLESS
    ]


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
