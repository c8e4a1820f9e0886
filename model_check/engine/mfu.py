"""Model FLOPs utilisation: the share of a device's peak that the model's own arithmetic takes.

Counted are the matrix products of forward and backward pass, 6 FLOPs a parameter and token (Kaplan
et al. 2020, section 2.1), without the embedding, which is a lookup, and attention's two products.
Work that is done twice (checkpointing) counts once. Two conventions, always named:

- full: attention as if every token saw every other, 12 L H D T a token (Chowdhery et al. 2022,
  PaLM, appendix B); what most published figures use.
- causal: half of that; what a causal kernel has to do.
"""

from dataclasses import dataclass

import torch

from model_check.config.derived import Geometry

# Dense 16-bit tensor-core TFLOP/s with float32 accumulation, from the vendor's data sheets (where a
# sheet gives the rate with sparsity: half of it). By the name that the driver gives.
_PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
}


@dataclass(frozen=True)
class FlopsPerToken:
    """Of one training step's forward and backward pass."""

    full: float
    causal: float


def flops_per_token(shape: Geometry, context_length: int) -> FlopsPerToken:
    """9.997e9 and 9.192e9 for the default geometry and context."""
    query = 2 * shape.hidden_size * shape.num_heads * shape.head_dim  # wq and wo
    key_value = 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    feed_forward = 3 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size
    products = 6 * (shape.num_layers * (query + key_value + feed_forward) + head)
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * context_length
    return FlopsPerToken(full=products + attention, causal=products + attention / 2)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s; None where no data sheet was read, or products are in float32."""
    tflops = _PEAK_TFLOPS.get(device_name) if dtype != torch.float32 else None
    return None if tflops is None else tflops * 1e12


@dataclass(frozen=True)
class Utilisation:
    """MFU at a rate of tokens, by both conventions; None on a device whose peak is not known."""

    flops: FlopsPerToken
    peak: float | None

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
        return flops * tokens_per_s / self.peak
