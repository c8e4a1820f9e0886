"""Dynamic loss scaling for float16, on the device.

float16 has no number between 0 and 6e-8, where many gradients lie, and none above 65504. So the
loss is multiplied by a scale as large as the gradients allow: it is halved when they overflow, and
doubled after many steps without an overflow (Micikevicius et al. 2018, Mixed Precision Training,
section 3.2). There the step is left out; here it is repeated (`overflow`).
"""

import math
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
    def count(self, good: Tensor) -> None:
        """A step is done. If it was `good` (a bool scalar) it counts towards the next doubling;
        else nothing changes: the step is computed again with the same scale."""
        num_good = self.num_good + good
        doubled = num_good >= self._steps_until_doubled
        self.value.mul_(torch.where(doubled, 2.0, 1.0)).clamp_(max=LARGEST_SCALE)
        self.num_good.copy_(num_good * ~doubled)

    def halve(self) -> None:
        """Gradients overflow: count from the beginning."""
        self.value.mul_(0.5).clamp_(min=SMALLEST_SCALE)
        self.num_good.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "num_good": self.num_good}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])
        self.num_good.copy_(state["num_good"])


def is_value(value: Tensor) -> bool:
    """Returns whether a run can have this loss scale, a float32 scalar: a power of two from
    SMALLEST_SCALE to LARGEST_SCALE. Waits for its device."""
    mantissa, _ = math.frexp(float(value))
    return mantissa == 0.5 and SMALLEST_SCALE <= float(value) <= LARGEST_SCALE


def loss_scale(dtype: torch.dtype, device: torch.device) -> LossScale | None:
    """None where products are not in float16: bfloat16 has the range of float32."""
    return LossScale(device) if dtype == torch.float16 else None
