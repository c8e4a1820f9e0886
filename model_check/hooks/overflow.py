"""float16: gradients that are not finite are an overflow, or a fault. An overflow comes back at the
same loss scale and goes away at a smaller one; what does neither is a fault."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_check.engine.results import StepMetrics
from model_check.forensics.scan import bad_gradients
from model_check.hooks.nonfinite import NonFiniteHandler
from model_check.loss_scale import LossScale
from model_check.train import StepContext, Trainer, accumulate


@dataclass(frozen=True)
class OverflowRepeat:
    """Repeats a step. No later step may have begun (lag 0): its weights must be as they were."""

    context: StepContext
    nonfinite: NonFiniteHandler
    note: Callable[[str], None]
    is_deterministic: bool

    def __call__(self, step: StepMetrics, trainer: Trainer) -> StepMetrics:
        """Returns the same step, trained at a smaller loss scale. Raises NonFiniteError for a
        fault; weights, moments and scale are those before it then."""
        scale = self.context.optimizer.loss_scale
        assert scale is not None, "without a loss scale nothing overflows"
        before = {name: value.clone() for name, value in scale.state_dict().items()}
        gradients = bad_gradients(self.context.model)
        if repeated := self._cured(step, scale, trainer):
            return repeated
        scale.load_state_dict(before)
        self.nonfinite.raise_for(step, gradients)

    def _cured(self, step: StepMetrics, scale: LossScale, trainer: Trainer) -> StepMetrics | None:
        """None: it was no overflow."""
        where = f"step {step.step}: gradients not finite in float16 at a loss scale of"
        # Without determinism a step at the edge may overflow in one of two computations.
        if self.is_deterministic and not self._overflows_again(step):
            text = f"{where} {step.loss_scale:g}, and finite when computed again: not an overflow"
            self.note(text)
            return None
        repeated = step
        while repeated.overflow:
            scale.halve()
            (repeated,) = trainer.compute(step.data)
        if repeated.bad:
            text = f"{where} {step.loss_scale:g}, nor at {repeated.loss_scale:g}: not an overflow"
            self.note(text)
            return None
        self.note(f"{where} {step.loss_scale:g}: an overflow; repeated at {repeated.loss_scale:g}")
        return repeated

    def _overflows_again(self, step: StepMetrics) -> bool:
        accumulate(self.context, step.data)
        norms = self.context.optimizer.grad_norms()
        return not bool(torch.isfinite(norms).all())  # sync
