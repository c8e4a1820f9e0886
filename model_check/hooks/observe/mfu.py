"""Model FLOPs utilisation: the share of a device's peak that the model's own arithmetic takes
(`config.flops` counts it)."""

from dataclasses import dataclass

import torch

from model_check.config.flops import FlopsPerToken
from model_check.config.gpu_models import peak_tflops


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s; None for a GPU that is not in the table, and for float32."""
    tflops = peak_tflops(device_name) if dtype != torch.float32 else None
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
