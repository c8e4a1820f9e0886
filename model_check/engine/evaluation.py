"""The loss on validation splits. It leaves the training state as it was."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor, nn

from model_check.data.read.loader import Batch
from model_check.engine.batches import on_device
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan
from model_check.events import Beat, Evaluation
from model_check.models.loss import IGNORED

BEAT_S = 1.0
"""How often a long evaluation shows that it is alive."""


class Evaluator:
    """Evaluates every split."""

    def __init__(self, state: TrainingState, plan: StepPlan) -> None:
        training = state.settings.training
        self._state, self._plan, self._interval = state, plan, training.eval_interval
        self._splits = state.context.splits
        self._best_split = training.best_split or next(iter(self._splits), None)

    def due(self, num_done: int) -> bool:
        return self._interval is not None and num_done % self._interval == 0

    def due_at_end(self, num_done: int) -> bool:
        """Whether the end of the run needs an evaluation of its own."""
        return self._interval is not None and not self.due(num_done)

    def evaluate(self, num_done: int, between: Callable[[], None]) -> Iterator[Evaluation]:
        """Each split's evaluation. `between` is called between batches, and may raise."""
        for name, batches in self._splits.items():
            yield self._noted(self._evaluate(name, batches(), num_done, between))

    def _evaluate(
        self, name: str, batches: Iterable[Batch], num_done: int, between: Callable[[], None]
    ) -> Evaluation:
        now = self._state.context.meter.now
        started = beaten = now()
        total = torch.zeros((), dtype=torch.float64, device=self._plan.device)
        num_targets = 0
        with untouched(self._state.model):
            for batch in batches:
                between()
                total += self._summed_loss(batch)
                num_targets += int((batch.targets != IGNORED).sum())
                if now() - beaten >= BEAT_S:
                    self._state.context.channels.sink.emit(Beat())
                    beaten = now()
        # float64 holds each count exactly.
        self._plan.world.meet(between)
        counted = total.new_tensor(num_targets)
        sums = self._plan.world.summed(torch.stack([total, counted]))
        total_loss, num_targets = float(sums[0]), int(sums[1])  # sync
        loss = total_loss / max(1, num_targets)
        return Evaluation(
            step=num_done,
            split=name,
            loss=loss.hex(),
            perplexity=perplexity(loss),
            tokens=num_targets,
            tokens_per_s=num_targets / max(1e-9, now() - started),
        )

    def _summed_loss(self, batch: Batch) -> Tensor:
        with self._plan.forward_context():
            loss: Tensor = self._state.model(*on_device(batch, self._plan.device))
        return loss

    def _noted(self, evaluation: Evaluation) -> Evaluation:
        """Remember it, marked where it is the best so far. A loss that is not finite never is."""
        validation, loss = self._state.progress.validation, float.fromhex(evaluation.loss)
        validation.val_loss[evaluation.split] = loss
        if evaluation.split != self._best_split or not math.isfinite(loss):
            return evaluation
        same_split = validation.best_split == self._best_split
        best = validation.best_val_loss if same_split else None
        if best is not None and loss >= best:
            return evaluation
        validation.best_split, validation.best_val_loss = evaluation.split, loss
        validation.best_step = evaluation.step
        return msgspec.structs.replace(evaluation, best=True)


def perplexity(loss: float) -> float | None:
    """exp(loss); None where that is no finite number."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else None


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards modes and random states as before."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), kept_rng():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
