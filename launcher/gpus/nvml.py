"""The child's side of asking NVML: how a child begins and calls, and the one that takes a snapshot.

The only importer of pynvml. `nvml_child` is the parent's side, and `probe.NvmlProbe` starts `main`;
the other child is `telemetry.sampler`. Imports little: it is started anew for every snapshot.
"""

import ctypes
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from launcher.contain.linux import die_with_parent
from launcher.gpus import codes
from model_check.utils.requests import ignore_requests

LIBRARY = "libnvidia-ml.so.1"
MIB = 1 << 20
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")

ANNOUNCEMENT_BYTES = 128
ANSWER = b"= "
"""Begins the line with the answer, which is JSON: a driver library may print lines of its own."""
ON_GPU = " on GPU "
"""In an announcement, before the index of the GPU that the call is about."""

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"

Announce = Callable[[str], None]
Fields = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    """`PARENT_PID SHARED_FD SKIPPED` (JSON: the indices of GPUs to leave alone): print the fields
    of a `probe.Snapshot`, or a string that says why NVML cannot be used."""
    parent_pid, shared_fd, skipped = arguments
    announce = begin(parent_pid, shared_fd)
    try:
        answer: Fields | str = read(announce, json.loads(skipped))
    except CallFailed as failed:
        answer = failed.describe()
    os.write(1, ANSWER + json.dumps(answer).encode() + b"\n")


def begin(parent_pid: str, shared_fd: str) -> Announce:
    """What every child that asks NVML does first: it ends with its parent, and not by a signal that
    is sent to a whole job. Returns what writes the name of the next call where the parent finds it;
    an empty name means that no call is being made."""
    ignore_requests()
    die_with_parent(int(parent_pid))
    fd = int(shared_fd)

    def announce(call: str) -> None:
        text = f"{time.monotonic():.6f} {call}".encode()[:ANNOUNCEMENT_BYTES]
        os.pwrite(fd, text.ljust(ANNOUNCEMENT_BYTES), 0)

    return announce


class CallFailed(Exception):
    """An NVML call that must succeed did not."""

    def __init__(self, call: str, code: int | None, text: str) -> None:
        super().__init__(call, code, text)
        self.call, self.code, self.text = call, code, text

    def describe(self, index: int | None = None, bus_id: str | None = None) -> str:
        """One line with what to do. `index`, `bus_id`: of the GPU that the call was about."""
        where = "NVML" if index is None else f"GPU {index}"
        where += f", PCI {bus_id}" if bus_id else ""
        number = "" if self.code is None else f" (NVML {self.code})"
        what = f"{self.call}: {self.text}{number}"
        otherwise = f" ({codes.WITHOUT})" if index is None else ""
        return f"{where} cannot be used: {what}; {codes.cure_for(self.code, index)}{otherwise}"


class Nvml:
    """pynvml, announcing each call, with one kind of error."""

    def __init__(self, pynvml: Any, announce: Announce) -> None:
        self.module = pynvml
        self._announce = announce
        self.subject = ""
        """Which GPU the calls are about, for the announcement: ` on GPU 3`."""

    def call(self, name: str, *arguments: Any) -> Any:
        """The result. Raises CallFailed."""
        self._announce(f"{name}{self.subject}")
        function = getattr(self.module, name, None)
        if function is None:
            raise CallFailed(name, codes.FUNCTION_NOT_FOUND, "this nvidia-ml-py does not know it")
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            raise CallFailed(name, error.value, str(error)) from error
        except self.module.NVMLLibraryMismatchError as error:
            raise CallFailed(name, codes.FUNCTION_NOT_FOUND, "Function Not Found") from error
        except UnicodeDecodeError as error:  # a damaged infoROM tells anything
            return error.object.decode(errors="replace")

    def call_for_key(self, name: str, handle: Any, attribute: str | None = None) -> str:
        """As `call`, a text by which other programs find the GPU: each of its bytes counts."""
        answer = self.call(name, handle)
        try:
            text = str(answer if attribute is None else getattr(answer, attribute))
        except UnicodeDecodeError:
            text = _NO_TEXT
        if _NO_TEXT in text:
            raise CallFailed(name, None, "its answer is no text")
        return text

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result, or None when this device has no such value. Raises CallFailed otherwise."""
        try:
            return self.call(name, *arguments)
        except CallFailed as failed:
            if failed.code not in codes.NOT_AVAILABLE:
                raise
            return None

    def memory(self, handle: Any) -> Any:
        """Bytes `used`, `total` and, from drivers since 510, the driver's own share as `reserved`.
        None: the device shares the host's memory."""
        name = "nvmlDeviceGetMemoryInfo"
        memory = self.ask(name, handle, self.module.nvmlMemory_v2)
        return self.ask(name, handle) if memory is None else memory

    def utilization_percent(self, handle: Any) -> int | None:
        rates = self.ask("nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else int(rates.gpu)


def read(announce: Announce, skipped: Collection[int]) -> Fields:
    """The fields of a Snapshot, but for the GPUs of these indices. Raises CallFailed."""
    absent = _why_absent(announce)
    if absent is not None:
        return {"reason": absent}
    nvml = open_nvml(announce)
    cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
    driver = nvml.ask("nvmlSystemGetDriverVersion")
    count = nvml.call("nvmlDeviceGetCount")
    gpus, broken, notes = _gpus(nvml, [n for n in range(count) if n not in skipped])
    return {
        "driver_version": driver,
        "cuda_driver_version": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": gpus,
        "broken": broken,
        "notes": notes,
        "reason": None if count else f"NVIDIA driver {driver} is loaded and reports no GPU",
    }


def _why_absent(announce: Announce) -> str | None:
    """Why there is no NVIDIA driver here; None when its library loads.

    Raises CallFailed when the library is there and does not load.
    """
    loading = f"the loading of {LIBRARY}"
    announce(loading)
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        if f"{LIBRARY}: cannot open shared object file: No such file" not in str(error):
            raise CallFailed(loading, codes.LIBRARY_NOT_FOUND, str(error)) from None
        absent = f"no NVIDIA driver ({LIBRARY} not found)"
        if os.path.exists("/proc/driver/nvidia/version"):
            absent += ", although its kernel module is loaded: a container started without --gpus?"
        return absent
    return None


def open_nvml(announce: Announce) -> Nvml:
    """NVML, initialised; `announce` is told of every call before it is made. Raises CallFailed."""
    try:
        import pynvml
    except ImportError as error:
        raise CallFailed("import pynvml", None, f"{error}; pip install nvidia-ml-py") from error
    nvml = Nvml(pynvml, announce)
    nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
    return nvml


def _gpus(nvml: Nvml, indices: Sequence[int]) -> tuple[list[Fields], list[Fields], list[str]]:
    """Each of these GPUs; those that cannot answer, as fields of BrokenGpu; and a note for each one
    that this process may not open.

    NVML counts GPUs that a device cgroup withholds and refuses their handle (its manual, at
    nvmlDeviceGetCount_v2): they belong to other jobs, and are not lost. When there is no other GPU
    they count as broken.
    """
    gpus: list[Fields] = []
    refused: list[Fields] = []
    broken: list[Fields] = []
    for index in indices:
        nvml.subject = f"{ON_GPU}{index}"
        bus_id = None
        try:
            handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
            bus_id = nvml.call_for_key("nvmlDeviceGetPciInfo", handle, "busId")
            gpus.append(_gpu(nvml, handle, index, bus_id))
        except CallFailed as failed:
            is_refused = failed.code == codes.NO_PERMISSION and bus_id is None
            why = failed.describe(index, bus_id)
            (refused if is_refused else broken).append({"index": index, "why": why})
    if not gpus and not broken:
        return gpus, refused, []
    notes = [f"GPU {gpu['index']} is left out: this process may not open it" for gpu in refused]
    return gpus, broken, notes


def _gpu(nvml: Nvml, handle: Any, index: int, bus_id: str) -> Fields:
    shared = {
        "index": index,
        "pci_bus_id": bus_id,
        "serial": _serial(nvml, handle),
        "compute_mode": _compute_mode(nvml, handle),
        "temperature_c": nvml.ask(
            "nvmlDeviceGetTemperature", handle, nvml.module.NVML_TEMPERATURE_GPU
        ),
        "cpus": sorted(_cpus(nvml, handle)),
    }
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    gpu = shared | _device(nvml, handle)
    if mode is not None and mode[0]:
        gpu |= {"mig_enabled": True, "mig_devices": [*_mig_devices(nvml, handle, shared)]}
    return gpu


def _serial(nvml: Nvml, handle: Any) -> str | None:
    # It lies in the infoROM: a GPU whose infoROM is damaged can be used all the same.
    with suppress(CallFailed):
        return nvml.call_for_key("nvmlDeviceGetSerial", handle) or None
    return None


def _device(nvml: Nvml, handle: Any) -> Fields:
    """What a GPU and a MIG instance both have of their own."""
    processes = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    return {
        "uuid": nvml.call_for_key("nvmlDeviceGetUUID", handle),
        "name": nvml.call("nvmlDeviceGetName", handle),
        "utilization_percent": nvml.utilization_percent(handle),
        "processes": processes and [(each.pid, _mib(each.usedGpuMemory)) for each in processes],
        **_memory(nvml, handle),
    }


def _mig_devices(nvml: Nvml, parent: Any, shared: Fields) -> Iterator[Fields]:
    """The instances of a GPU in MIG mode; slots in between may be empty."""
    for slot in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
        handle = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, slot)
        if handle is not None:
            yield shared | {"mig_index": slot} | _device(nvml, handle)


def _memory(nvml: Nvml, handle: Any) -> Fields:
    memory, shares = nvml.memory(handle), ("total", "used", "reserved")
    return {f"{share}_mib": _mib(getattr(memory, share, None)) for share in shares}


def _mib(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes // MIB


def _compute_mode(nvml: Nvml, handle: Any) -> str | None:
    mode = nvml.ask("nvmlDeviceGetComputeMode", handle)
    return COMPUTE_MODES[mode] if mode in range(len(COMPUTE_MODES)) else None


def _cpus(nvml: Nvml, handle: Any) -> set[int]:
    """Cores near the GPU that this process may run on; empty: NVML does not say."""
    usable = os.sched_getaffinity(0)
    words = nvml.ask("nvmlDeviceGetCpuAffinity", handle, max(usable) // 64 + 1)
    if words is None:
        return set()
    return {cpu for cpu in usable if words[cpu // 64] >> cpu % 64 & 1}
