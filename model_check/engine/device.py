"""The device of this worker: chosen, checked, described; its process made reproducible."""

import ctypes
import os
import platform
from collections.abc import Mapping

import torch

from model_check.config.schema import SystemSettings
from model_check.errors import ConfigError, NoGpuError
from model_check.events import Scalar
from model_check.utils.worker_env import WorkerEnv

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's mallopt."""


def set_up_process(system: SystemSettings, num_workers: int, environ: Mapping[str, str]) -> None:
    """Threads and determinism. Call before anything touches the GPU or runs an operator."""
    torch.set_num_threads(system.num_threads or default_num_threads(num_workers, environ))
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 means float32
    if system.deterministic:
        _be_deterministic()


def default_num_threads(num_workers: int, environ: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS where it is set, else this worker's share of the cores. At least 1, and fixed
    for the run: the order of a CPU's sums depends on it."""
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def keep_freed_memory() -> None:
    """Let malloc keep up to 512 MiB of what is freed: on a CPU the next step takes the same again.

    glibc hands it back at once, and the kernel zeroes each page anew (vocabulary 32768, 2 x 2 x 512
    tokens: 215,000 page faults a step, a quarter of its CPU time). Blocks above 32 MiB go back as
    ever: they would not fit together again, and the process would grow.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def cuda_usable() -> bool:
    return torch.cuda.is_available()


def pick_device(kind: str, device_id: int, env: WorkerEnv) -> torch.device:
    """`cuda` or `cpu` -> the device, current in this process.

    Raises NoGpuError or ConfigError when it is not there or not the one the supervisor meant.
    """
    if kind == "cpu":
        return torch.device("cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    if not torch.cuda.is_available():
        raise NoGpuError(
            f"system.device = cuda: torch {torch.__version__} sees no GPU (built for CUDA "
            f"{torch.version.cuda}, CUDA_VISIBLE_DEVICES = {visible!r}); `bash run.sh doctor` "
            "tells why, system.device=cpu trains without"
        )
    if device_id >= torch.cuda.device_count():
        raise ConfigError(
            f"system.device_id = {device_id}: {torch.cuda.device_count()} device(s) visible "
            f"(CUDA_VISIBLE_DEVICES = {visible!r}), numbered from 0"
        )
    device = torch.device("cuda", device_id)
    torch.cuda.set_device(device)
    check_uuid(env.expected_uuid, str(torch.cuda.get_device_properties(device).uuid))
    return device


def check_uuid(expected: str | None, seen: str) -> None:
    """Raises NoGpuError when another GPU is seen than the supervisor meant.

    For a slice (`MIG-...`) CUDA may tell the UUID of the slice or of its GPU: no check is possible.
    """
    if expected is None or expected.startswith("MIG-"):
        return
    if _bare(expected) != _bare(seen):
        raise NoGpuError(
            f"this worker was given {expected} and sees GPU-{_bare(seen)}: CUDA_VISIBLE_DEVICES = "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r} was changed on the way, or the driver "
            "numbers its GPUs anew; nothing was trained"
        )


def describe_device(device: torch.device) -> dict[str, Scalar]:
    """For the `build` phase's detail: only workers that agree in it can have equal bits."""
    common: dict[str, Scalar] = {
        "device": str(device),
        "torch": str(torch.__version__),  # a str of its own class, which the encoder refuses
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cpu":
        return common | {"device_name": _cpu_name(), "num_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return common | {
        "device_name": properties.name,
        "uuid": str(properties.uuid),
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def device_name(device: torch.device) -> str:
    """What the driver, or /proc/cpuinfo, calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _be_deterministic() -> None:
    # cuBLAS reads it once, when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # An operator that varies is an error. What use_deterministic_algorithms(True) does, but for the
    # import of torch._inductor to configure it: 1.8 s of a worker's start, and nothing is compiled.
    torch.set_deterministic_debug_mode("error")
    # By default strict mode fills new memory with NaN: it could make the very NaN we look for.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
