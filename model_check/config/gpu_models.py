"""GPUs by name: peak, memory and bandwidth. Each figure has a source, often a copy of NVIDIA's
sheet; a GPU without one is not here."""

from msgspec import Struct

from model_check.config.backends import HOPPER
from model_check.config.fields import nearest
from model_check.errors import UsageError


class GpuModel(Struct, frozen=True):
    """One kind of GPU."""

    name: str
    """As its driver says it."""
    short: str
    """As people say it."""
    tflops: float
    """Dense bfloat16 on tensor cores, accumulated in float32; float16 has the same."""
    gbytes_per_s: float
    """Of its memory, by the sheet."""
    memory_mib: int
    """Its total, as nvidia-smi of public logs says it: less than the sheet where ECC takes part."""
    capability: tuple[int, int]
    """Compute capability: (9, 0) is 9.0."""

    @property
    def is_hopper_or_newer(self) -> bool:
        return self.capability >= HOPPER

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


# Peaks of sheets with sparsity are twice these. In the order of the sheets' sources: A100 data
# sheet (SXM and PCIe alike); A40: "BF16 with FP32 accumulate 149.7 | 299.4"; L4: 242 with sparsity;
# L40: 181.05 | 362.1; L40S: 362.05 | 733; H100 product page: 1,979 with sparsity, PCIe 1,513 and
# NVL 1,671 as torchtitan reads it; H200: 1,979; HGX B200 data sheet: 4,500, at 1000 W; RTX 4090:
# Ada architecture whitepaper, "Peak BF16 Tensor TFLOPS with FP32 Accumulate 165.2/330.4".
# Memory's speed: the same sheets (H100: 3.35 TB/s, PCIe 2, NVL 3.9; B200: 64 TB/s of eight in the
# DGX B200 data sheet; older copies say 7.7 of one). Compute capability: NVIDIA's table of GPUs.
GPU_MODELS = (
    GpuModel("NVIDIA A100-SXM4-40GB", "A100-40GB", 312.0, 1555, 40960, (8, 0)),
    GpuModel("NVIDIA A100-SXM4-80GB", "A100", 312.0, 2039, 81920, (8, 0)),
    GpuModel("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB", 312.0, 1555, 40960, (8, 0)),
    GpuModel("NVIDIA A100 80GB PCIe", "A100-PCIe", 312.0, 1935, 81920, (8, 0)),
    GpuModel("NVIDIA A40", "A40", 149.7, 696, 46068, (8, 6)),
    GpuModel("NVIDIA L4", "L4", 121.0, 300, 23034, (8, 9)),
    GpuModel("NVIDIA L40", "L40", 181.05, 864, 46068, (8, 9)),
    GpuModel("NVIDIA L40S", "L40S", 362.05, 864, 46068, (8, 9)),
    GpuModel("NVIDIA H100 80GB HBM3", "H100", 989.4, 3350, 81559, (9, 0)),
    GpuModel("NVIDIA H100 PCIe", "H100-PCIe", 756.0, 2000, 81559, (9, 0)),
    GpuModel("NVIDIA H100 NVL", "H100-NVL", 835.0, 3900, 95830, (9, 0)),
    GpuModel("NVIDIA H200", "H200", 989.4, 4800, 143771, (9, 0)),
    GpuModel("NVIDIA B200", "B200", 2250.0, 8000, 183359, (10, 0)),
    GpuModel("NVIDIA GeForce RTX 4090", "RTX-4090", 165.2, 1008, 24564, (8, 9)),
)


def gpu_model(name: str) -> GpuModel:
    """By its short name or its driver's, however it is spelt: `h100`, `rtx 4090`. Raises
    UsageError, which tells the nearest name."""
    known = {_plain(n): each for each in GPU_MODELS for n in (each.short, each.name)}
    if found := known.get(_plain(name)):
        return found
    there_are = [each.short for each in GPU_MODELS]
    near = nearest(name.upper(), there_are)
    hint = f"did you mean {near}? " if near else ""
    raise UsageError(
        f"--gpu-model {name or repr(name)}: no figures of such a GPU; "
        f"{hint}known are {', '.join(there_are)}"
    )


def peak_tflops(device_name: str) -> float | None:
    """Of the driver's name; None: not in the table."""
    found = (each.tflops for each in GPU_MODELS if each.name == device_name)
    return next(found, None)


def _plain(name: str) -> str:
    text = "".join(c for c in name.lower() if c.isalnum())
    return text.removeprefix("nvidia").removeprefix("geforce")
