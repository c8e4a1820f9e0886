"""Chooses, checks and describes the device of this worker; makes its process reproducible."""

import ctypes
import os
import platform
from collections.abc import Mapping

import torch

from model_check.config.derived import precision
from model_check.config.schema import SystemSettings, TrainingSettings
from model_check.errors import ConfigError, NoGpuError
from model_check.events import Scalar
from model_check.utils.cores import usable_cores
from model_check.utils.worker_env import RankEnv, WorkerEnv

CUBLAS_WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_DECIDE_BITS = (
    *(CUBLAS_WORKSPACE, "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_ENABLED"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
)
"""Variables by which cuBLAS, MKL and oneDNN choose kernels, so that their sums round otherwise."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's mallopt."""


def set_up_process(
    system: SystemSettings, num_workers: int, environ: Mapping[str, str]
) -> str | None:
    """Threads and determinism. Call it before the GPU is used and before any operator runs. What of
    the environment it had to replace, for people; None: nothing."""
    torch.set_num_threads(system.num_threads or default_num_threads(num_workers, environ))
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 means float32
    if not system.deterministic:
        return None
    _be_deterministic()
    return _take_workspace()


def default_num_threads(num_workers: int, environ: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS where it is set, else this worker's share of the cores, at least 1. It stays
    for the run: the order of sums on a CPU depends on it."""
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, usable_cores() // num_workers)


def keep_freed_memory() -> None:
    """Let malloc keep up to 512 MiB of freed memory: on a CPU the next step needs the same again.

    By default glibc returns it at once, and the kernel zeroes each page again (vocabulary 32768,
    2 x 2 x 512 tokens: 215,000 page faults a step, a quarter of its CPU time). Blocks above 32 MiB
    still go back: their holes would not fit later blocks, and the process would grow.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def cuda_usable() -> bool:
    return torch.cuda.is_available()


def own_device_id(system: SystemSettings, ranks: RankEnv | None) -> int:
    """Of a rank: its number on this machine, unless it sees one GPU alone, as under `srun
    --gpus-per-task=1`. Raises ConfigError where the settings name one for all ranks."""
    if ranks is None or not torch.cuda.is_available():
        return system.device_id
    if system.device_id != 0:
        raise ConfigError(
            f"system.device_id = {system.device_id}: each rank of a job takes the GPU of its "
            "LOCAL_RANK; leave it out"
        )
    return ranks.local_rank if torch.cuda.device_count() > 1 else 0


def pick_device(kind: str, device_id: int, env: WorkerEnv) -> torch.device:
    """`cuda` or `cpu` -> the device, current in this process.

    Raises NoGpuError or ConfigError for a device that is not visible, or not the expected one.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        cuda = torch.version.cuda
        built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
        raise NoGpuError(
            f"system.device = cuda: torch {torch.__version__} ({built}) sees no GPU; {_mask()}. "
            "`bash run.sh doctor` says why; system.device=cpu trains without one"
        )
    if device_id >= torch.cuda.device_count():
        raise ConfigError(
            f"system.device_id = {device_id}: {torch.cuda.device_count()} device(s) visible, "
            f"numbered from 0; {_mask()}"
        )
    device = torch.device("cuda", device_id)
    torch.cuda.set_device(device)
    check_uuid(env.expected_uuid, str(torch.cuda.get_device_properties(device).uuid))
    return device


def _mask() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    state = "is not set" if visible is None else f"is {visible!r}"
    return f"CUDA_VISIBLE_DEVICES {state}"


def check_uuid(expected: str | None, seen: str) -> None:
    """Raises NoGpuError when the visible GPU is not the expected one.

    For a slice (`MIG-...`) CUDA may report the UUID of the slice or of its GPU: it is not checked.
    """
    if expected is None or expected.startswith("MIG-"):
        return
    if _bare(expected) != _bare(seen):
        raise NoGpuError(
            f"this worker was given {expected} and sees GPU-{_bare(seen)}: CUDA_VISIBLE_DEVICES = "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r} was changed on the way, or the driver "
            "numbers its GPUs anew; nothing was trained"
        )


def compute_dtype(training: TrainingSettings, device: torch.device) -> torch.dtype:
    """Of matrix products; weights, gradients and moments are always float32. Raises ConfigError
    where bfloat16 was asked for and is only emulated."""
    dtype = _DTYPES[precision(training)]
    emulated = dtype == torch.bfloat16 and device.type == "cuda"
    if emulated and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"training.use_amp = true: {torch.cuda.get_device_name(device)} has no bfloat16; set "
            "training.precision=fp16 or training.use_amp=false"
        )
    return dtype


def describe_device(
    device: torch.device, environ: Mapping[str, str] = os.environ
) -> dict[str, Scalar]:
    """For the detail of the `build` phase: only workers that agree in it can have equal bits."""
    common: dict[str, Scalar] = {
        "device": str(device),
        "torch": str(torch.__version__),  # of a subclass of str that the encoder refuses
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device_name": device_name(device),
        "math_environ": _math_environ(environ),
    }
    if device.type == "cpu":
        isa = torch.backends.cpu.get_cpu_capability()  # its kernels are others
        return common | {"num_threads": torch.get_num_threads(), "isa": isa}
    properties = torch.cuda.get_device_properties(device)
    return common | {
        "uuid": str(properties.uuid),
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "sums_in_16_bits": _adds_in_16_bits(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def device_name(device: torch.device) -> str:
    """Its name in the driver, or in /proc/cpuinfo."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _math_environ(environ: Mapping[str, str]) -> str | None:
    """`MKL_CBWR=COMPATIBLE`. None: nothing but what this program sets itself."""
    named = [f"{name}={environ[name]}" for name in _DECIDE_BITS if environ.get(name)]
    return ", ".join(v for v in named if v != f"{CUBLAS_WORKSPACE}={DETERMINISTIC}") or None


def _adds_in_16_bits() -> bool:
    """Whether cuBLAS may add partial sums of bfloat16 products in bfloat16."""
    return bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)


def _be_deterministic() -> None:
    # An operator that varies raises. use_deterministic_algorithms(True) does the same, and imports
    # torch._inductor to configure it: 1.8 s of a worker's start, where nothing is compiled.
    torch.set_deterministic_debug_mode("error")
    # By default strict mode fills new memory with NaN, which could cause the NaN that we look for.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # By default cuBLAS may add partial sums of a long product in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _take_workspace() -> str | None:
    """cuBLAS reads the variable once, when its first handle is made. With any other value than
    these two torch refused every product on a GPU (until pytorch #161749), and no kernel passed its
    trial."""
    given = os.environ.get(CUBLAS_WORKSPACE)
    if given in (DETERMINISTIC, ":16:8"):
        return None
    os.environ[CUBLAS_WORKSPACE] = DETERMINISTIC
    if not given:
        return None
    return (
        f"{CUBLAS_WORKSPACE} = {given!r} is replaced by {DETERMINISTIC}: where results must "
        "repeat, torch takes that or :16:8"
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
