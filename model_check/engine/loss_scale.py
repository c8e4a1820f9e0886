"""Dynamic loss scaling for float16, on the device.

float16 has no number between 0 and 6e-8, where many gradients lie, and none above 65504. So the
loss is multiplied by a scale as large as the gradients allow: it is halved when they overflow (that
step is left out), and doubled after many steps without an overflow (Micikevicius et al. 2018, Mixed
Precision Training, section 3.2).
"""

from typing import Any

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 1.0
"""Gradients that overflow at this scale overflow without one."""
LARGEST_SCALE = 2.0**24
STEPS_UNTIL_DOUBLED = 2000


class LossScale:
    """Always a power of two: scaling changes no bit of a mantissa. Nothing here waits for the
    device."""

    def __init__(
        self,
        device: torch.device,
        first: float = FIRST_SCALE,
        steps_until_doubled: int = STEPS_UNTIL_DOUBLED,
    ) -> None:
        self.value = torch.tensor(first, device=device)
        self.num_good = torch.zeros((), device=device)
        """Steps without an overflow since the scale last changed."""
        self._steps_until_doubled = steps_until_doubled

    def exhausted(self, overflow: Tensor) -> Tensor:
        """Whether gradients overflow (a bool scalar) although the scale cannot be halved."""
        return overflow & (self.value <= SMALLEST_SCALE)

    @torch.no_grad()
    def update(self, overflow: Tensor, refused: Tensor) -> None:
        """Set the scale of the next step (both arguments are bool scalars). It stays where the step
        is `refused`: the evidence is computed again with the same scale."""
        num_good = (self.num_good + 1) * ~overflow
        doubled = num_good >= self._steps_until_doubled
        factor = torch.where(overflow, 0.5, torch.where(doubled, 2.0, 1.0))
        value = (self.value * factor).clamp(SMALLEST_SCALE, LARGEST_SCALE)
        self.value.copy_(torch.where(refused, self.value, value))
        self.num_good.copy_(torch.where(refused, self.num_good, num_good * ~doubled))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "num_good": self.num_good}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])
        self.num_good.copy_(state["num_good"])


def loss_scale(dtype: torch.dtype, device: torch.device) -> LossScale | None:
    """None where products are not in float16: bfloat16 has the range of float32."""
    return LossScale(device) if dtype == torch.float16 else None
