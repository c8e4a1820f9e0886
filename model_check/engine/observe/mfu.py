"""Model FLOPs utilisation: the share of a device's peak that the model's own arithmetic takes.

It counts the matrix products of forward and backward pass, 6 FLOPs a parameter and token (Kaplan et
al. 2020, section 2.1), without the embedding, which is a lookup, and the two products of attention.
Work that is done twice (checkpointing) counts once. There are two conventions, always named:

- full: attention as if every token saw every other, 12 L H D T a token (Chowdhery et al. 2022,
  PaLM, appendix B); what most published figures use. Of local and Infini-attention T is a segment.
- causal: half of that; what a causal kernel has to do.
"""

from dataclasses import dataclass

import torch

from model_check.config.derived import segment_length
from model_check.config.schema import Settings
from model_check.config.shape import Geometry

# Dense bfloat16 tensor-core TFLOP/s, by the driver's name of the GPU; float16 has the same. Each
# has a source, often a copy of NVIDIA's sheet; a GPU without a source is not here.
_PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,  # A100 data sheet and product page, SXM and PCIe alike
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A40": 149.7,  # A40 data sheet: "BF16 with FP32 accumulate 149.7 | 299.4 with sparsity"
    "NVIDIA L4": 121.0,  # L4 data sheet: 242 with sparsity, so half of it
    "NVIDIA L40": 181.05,  # L40 data sheet: 181.05 | 362.1 with sparsity
    "NVIDIA L40S": 362.05,  # L40S data sheet: 362.05 | 733 with sparsity
    "NVIDIA H100 80GB HBM3": 989.4,  # H100 product page: 1,979 with sparsity
    "NVIDIA H100 PCIe": 756.0,  # H100 product page as torchtitan reads it: 1,513 with sparsity
    "NVIDIA H100 NVL": 835.0,  # the same: 1,671 with sparsity
    "NVIDIA H200": 989.4,  # H200 product page: 1,979 with sparsity
    "NVIDIA B200": 2250.0,  # HGX B200 data sheet: 4,500 with sparsity, at 1000 W
}


@dataclass(frozen=True)
class FlopsPerToken:
    """Of one training step's forward and backward pass."""

    full: float
    causal: float


def flops_per_token(settings: Settings, shape: Geometry) -> FlopsPerToken:
    """9.997e9 and 9.192e9 for the default geometry and context."""
    products = 6 * shape.num_multiplied + _of_memory(settings, shape)
    span = segment_length(settings) or settings.training.context_length
    attention = 12 * shape.num_layers * shape.query_width * span
    return FlopsPerToken(full=products + attention, causal=products + attention / 2)


def _of_memory(settings: Settings, shape: Geometry) -> int:
    """Of Infini-attention: each query reads a [D, D] matrix, each key is written to one, and by the
    delta rule reads it before. Not counted: divisors and the sums over segments."""
    if shape.attention != "infini":
        return 0
    times = 2 if settings.model.infini.update == "delta" else 1
    width = shape.query_width + times * shape.key_width
    return 6 * shape.num_layers * shape.head_dim * width


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s; None for a GPU that is not in the table, and for float32."""
    tflops = _PEAK_TFLOPS.get(device_name) if dtype != torch.float32 else None
    return None if tflops is None else tflops * 1e12


@dataclass(frozen=True)
class Utilisation:
    """MFU at a rate of tokens, by both conventions; None on a device whose peak is not known."""

    flops: FlopsPerToken
    peak: float | None
    num_devices: int = 1

    def full(self, tokens_per_s: float | None) -> float | None:
        return self._share(self.flops.full, tokens_per_s)

    def causal(self, tokens_per_s: float | None) -> float | None:
        return self._share(self.flops.causal, tokens_per_s)

    def describe(self, tokens_per_s: float | None) -> str:
        """`58.1 % (full attention), 53.4 % (causal)`, or `n/a`."""
        full, causal = self.full(tokens_per_s), self.causal(tokens_per_s)
        if full is None or causal is None:
            return "n/a"
        return f"{full:.1%} (full attention), {causal:.1%} (causal)"

    def _share(self, flops: float, tokens_per_s: float | None) -> float | None:
        if self.peak is None or tokens_per_s is None:
            return None
        return flops * tokens_per_s / (self.peak * self.num_devices)
