"""float16: gradients that are not finite are an overflow, or a fault. An overflow comes back at the
same loss scale and goes away at a smaller one; what does neither is a fault."""

from dataclasses import dataclass

import torch

from model_check.engine.alarm import Alarm
from model_check.engine.loss_scale import LossScale
from model_check.engine.reading import Reader, StepMetrics
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate, train_step
from model_check.forensics.scan import bad_gradients


@dataclass(frozen=True)
class Overflow:
    """Repeats a step. No later step may have begun (lag 0): its weights must be as they were."""

    state: TrainingState
    plan: StepPlan
    reader: Reader
    alarm: Alarm

    def settle(self, step: StepMetrics) -> StepMetrics:
        """`step`, or where its gradients overflowed the same step, trained at a smaller scale.
        Raises NonFiniteError for a fault; weights, moments and scale are those before it then."""
        scale = self.state.optimizer.loss_scale
        if not step.overflow or scale is None:
            return step
        before = {name: value.clone() for name, value in scale.state_dict().items()}
        gradients = bad_gradients(self.state.model)
        if repeated := self._cured(step, scale):
            return repeated
        scale.load_state_dict(before)
        self.alarm.raise_for(step, gradients)

    def _cured(self, step: StepMetrics, scale: LossScale) -> StepMetrics | None:
        """None: it was no overflow."""
        note = self.state.context.channels.note
        where = f"step {step.step}: gradients not finite in float16 at a loss scale of"
        # Without determinism a step at the edge may overflow in one of two computations.
        if self.state.settings.system.deterministic and not self._overflows_again(step):
            note(f"{where} {step.loss_scale:g}, and finite when computed again: not an overflow")
            return None
        repeated = step
        while repeated.overflow:
            scale.halve()
            repeated = self._train(step)
        if repeated.bad:
            note(f"{where} {step.loss_scale:g}, nor at {repeated.loss_scale:g}: not an overflow")
            return None
        note(f"{where} {step.loss_scale:g}: an overflow; repeated at {repeated.loss_scale:g}")
        return repeated

    def _overflows_again(self, step: StepMetrics) -> bool:
        optimizer = self.state.optimizer
        accumulate(self.state.model, step.data, optimizer, self.plan)
        return not bool(torch.isfinite(optimizer.grad_norms()).all())  # sync

    def _train(self, step: StepMetrics) -> StepMetrics:
        state = self.state
        result = train_step(state.model, step.data, state.optimizer, step.lr, self.plan)
        (repeated,) = self.reader.push(step.data, step.lr, result)
        return repeated
