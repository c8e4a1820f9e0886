"""Read NVML once and print what it says: the child process of `probe.NvmlProbe`.

The only importer of pynvml. Before each call it prints the call's name, so that the parent can name
the one that never returns; the last line is the answer as JSON, in the fields of `probe.Snapshot`.
Imports little: it is started anew for every snapshot.
"""

import ctypes
import json
import os
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
MIB = 1 << 20
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")

NO_PERMISSION = 4
NOT_FOUND = 6
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
NOT_AVAILABLE = {2, 3, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND}
"""Invalid argument, not supported, no permission, not found, function not found: this device or
driver has no such value. Any other code is a device in trouble."""

Fields = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    """Print the answer. `arguments`: seconds after which the kernel ends this process; the GPUs to
    leave alone (JSON: their indices)."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(arguments[0]))  # no orphan of a killed launcher
    try:
        answer = {"snapshot": read(json.loads(arguments[1]))}
    except CallFailed as failed:
        answer = {"failure": failed.fields()}
    _print("= " + json.dumps(answer))


class CallFailed(Exception):
    """An NVML call that must succeed did not."""

    def __init__(self, call: str, code: int | None, text: str) -> None:
        super().__init__(call, code, text)
        self.call, self.code, self.text = call, code, text
        self.index: int | None = None
        self.bus_id: str | None = None

    def fields(self) -> Fields:
        return vars(self)


class Nvml:
    """pynvml, announcing each call, with one kind of error."""

    def __init__(self, pynvml: Any, announce: Callable[[str], None]) -> None:
        self.module = pynvml
        self._announce = announce
        self.subject = ""
        """Which GPU the calls are about, for the announcement: ` on GPU 3`."""

    def call(self, name: str, *arguments: Any) -> Any:
        """The result. Raises CallFailed."""
        self._announce(f"{name}{self.subject}")
        function = getattr(self.module, name, None)
        if function is None:
            raise CallFailed(name, FUNCTION_NOT_FOUND, "this nvidia-ml-py does not know it")
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            raise CallFailed(name, error.value, str(error)) from error
        except self.module.NVMLLibraryMismatchError as error:
            raise CallFailed(name, FUNCTION_NOT_FOUND, "Function Not Found") from error

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result, or None when this device has no such value. Raises CallFailed otherwise."""
        try:
            return self.call(name, *arguments)
        except CallFailed as failed:
            if failed.code not in NOT_AVAILABLE:
                raise
            return None


def read(skipped: Collection[int]) -> Fields:
    """The fields of a Snapshot, but for the GPUs of these indices. Raises CallFailed."""
    absent = _why_absent()
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


def _why_absent() -> str | None:
    """Why there is no NVIDIA driver here; None when its library loads.

    Raises CallFailed when the library is there and does not load.
    """
    announce(f"the loading of {LIBRARY}")
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        if f"{LIBRARY}: cannot open shared object file: No such file" not in str(error):
            raise CallFailed(f"the loading of {LIBRARY}", LIBRARY_NOT_FOUND, str(error)) from None
        absent = f"no NVIDIA driver ({LIBRARY} not found)"
        if os.path.exists("/proc/driver/nvidia/version"):
            absent += ", although its kernel module is loaded: a container started without --gpus?"
        return absent
    return None


def open_nvml(announce: Callable[[str], None]) -> Nvml:
    """NVML, initialised; `announce` is told of every call before it is made. Raises CallFailed."""
    nvml = Nvml(_import_pynvml(), announce)
    nvml.call("nvmlInitWithFlags", nvml.module.NVML_INIT_FLAG_NO_GPUS)
    return nvml


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise CallFailed("import pynvml", None, f"{error}; pip install nvidia-ml-py") from error
    return pynvml


def _gpus(nvml: Nvml, indices: Sequence[int]) -> tuple[list[Fields], list[Fields], list[str]]:
    """Each of these GPUs; those that cannot answer; and a note for each one that this process may
    not touch.

    NVML counts GPUs that a device cgroup withholds and refuses their handle (its manual, at
    nvmlDeviceGetCount_v2): they are somebody else's, not lost. Raises CallFailed when none is left.
    """
    gpus: list[Fields] = []
    refused: list[CallFailed] = []
    broken: list[CallFailed] = []
    for index in indices:
        nvml.subject = f" on GPU {index}"
        bus_ids: list[str] = []
        try:
            gpus.append(_gpu(nvml, index, bus_ids))
        except CallFailed as failed:
            failed.index, failed.bus_id = index, next(iter(bus_ids), None)
            is_refused = failed.code == NO_PERMISSION and not bus_ids
            (refused if is_refused else broken).append(failed)
    if not gpus and (broken or refused):
        raise (broken or refused)[0]
    notes = [f"GPU {r.index} is left out: this process may not open it" for r in refused]
    return gpus, [failed.fields() for failed in broken], notes


def _gpu(nvml: Nvml, index: int, bus_ids: list[str]) -> Fields:
    """One GPU; `bus_ids` gets its PCI bus id once it is known, for the message of a failure."""
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    bus_ids.append(nvml.call("nvmlDeviceGetPciInfo", handle).busId)
    shared = {
        "index": index,
        "pci_bus_id": bus_ids[0],
        "compute_mode": _compute_mode(nvml, handle),
        "temperature_c": _temperature(nvml, handle),
        "cpus": sorted(_cpus(nvml, handle, bus_ids[0])),
    }
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    gpu = shared | _device(nvml, handle)
    if mode is not None and mode[0]:
        gpu |= {"mig_enabled": True, "mig_devices": _mig_devices(nvml, handle, shared)}
    return gpu


def _device(nvml: Nvml, handle: Any) -> Fields:
    """What a GPU and a MIG instance both have of their own."""
    utilization = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    processes = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    return {
        "uuid": nvml.call("nvmlDeviceGetUUID", handle),
        "name": nvml.call("nvmlDeviceGetName", handle),
        "utilization_percent": None if utilization is None else utilization.gpu,
        "processes": None
        if processes is None
        else [(process.pid, _mib(process.usedGpuMemory)) for process in processes],
        **_memory(nvml, handle),
    }


def _mig_devices(nvml: Nvml, parent: Any, shared: Fields) -> list[Fields]:
    """The instances of a GPU in MIG mode; slots in between may be empty."""
    devices = []
    for slot in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
        handle = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, slot)
        if handle is not None:
            devices.append(shared | {"mig_index": slot} | _device(nvml, handle))
    return devices


def _memory(nvml: Nvml, handle: Any) -> Fields:
    """Memory in MiB. Version 2 tells the driver's own share apart; drivers before 510 lack it, and
    devices that share the host's memory have neither."""
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, nvml.module.nvmlMemory_v2)
    reserved = None if memory is None else memory.reserved
    if memory is None:
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return {}
    used, total = _mib(memory.used), _mib(memory.total)
    return {"total_mib": total, "used_mib": used, "reserved_mib": _mib(reserved)}


def _mib(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes // MIB


def _compute_mode(nvml: Nvml, handle: Any) -> str | None:
    mode = nvml.ask("nvmlDeviceGetComputeMode", handle)
    return COMPUTE_MODES[mode] if mode in range(len(COMPUTE_MODES)) else None


def _temperature(nvml: Nvml, handle: Any) -> int | None:
    degrees: int | None = nvml.ask(
        "nvmlDeviceGetTemperature", handle, nvml.module.NVML_TEMPERATURE_GPU
    )
    return degrees


def _cpus(nvml: Nvml, handle: Any, bus_id: str) -> set[int]:
    """Cores near the GPU that this process may run on; empty when nobody says."""
    num_words = (max(os.sched_getaffinity(0)) + 64) // 64
    words = nvml.ask("nvmlDeviceGetCpuAffinity", handle, num_words)
    near = _cpus_of_mask(words) if words is not None else _cpus_of_sysfs(bus_id)
    return near & os.sched_getaffinity(0)


def _cpus_of_mask(words: Any) -> set[int]:
    return {
        64 * position + bit
        for position, word in enumerate(words)
        for bit in range(64)
        if word >> bit & 1
    }


def _cpus_of_sysfs(bus_id: str) -> set[int]:
    domain, _, rest = bus_id.lower().partition(":")  # NVML writes 8 digits, the kernel 4 or more
    try:
        with open(f"/sys/bus/pci/devices/{int(domain, 16):04x}:{rest}/local_cpulist") as file:
            return parse_cpulist(file.read())
    except (OSError, ValueError):
        return set()


def parse_cpulist(text: str) -> set[int]:
    """The kernel's list format: `0-3,8` is {0, 1, 2, 3, 8}. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def announce(call: str) -> None:
    """Tell the parent what comes next: it is what never returned, if nothing comes after it."""
    _print(f"> {call}")


def _print(line: str) -> None:
    os.write(1, line.encode() + b"\n")
