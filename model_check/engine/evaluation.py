"""The loss on validation splits. It leaves the training state as it was."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from model_check.data.read.loader import Batch
from model_check.engine.batches import on_device
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan
from model_check.events import BEAT_S, Beat, Evaluation
from model_check.model import IGNORED


class Evaluator:
    """Evaluates every split."""

    def __init__(self, state: TrainingState, plan: StepPlan) -> None:
        training = state.settings.training
        self._state, self._plan, self._interval = state, plan, training.eval_interval
        self._splits = state.context.splits
        self._has_examples = state.settings.training.stage == "prompt_target"
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
        counts = _Counts(torch.zeros((), dtype=torch.float64, device=self._plan.device))
        world, model = self._plan.world, self._state.model
        # One forward context for all batches: no weight changes, and none is cast again.
        with untouched(model), world.computing(), self._plan.forward_context():
            for batch in world.in_step(batches):
                between()
                found = self._of_batch(batch or self._empty_batch())
                if batch is not None:
                    counts.add(found)
                if now() - beaten >= BEAT_S:
                    self._state.context.channels.sink.emit(Beat())
                    beaten = now()
        world.settle(model)
        world.meet(between)
        sums = world.summed(counts.told())
        world.wait_for_device()
        return _evaluation(num_done, name, sums, now() - started)

    def _empty_batch(self) -> Batch:
        """Of no targets: for a rank that has no more, and computes with those that have."""
        tokens = torch.zeros(1, self._state.settings.training.context_length, dtype=torch.int64)
        return Batch(tokens, torch.full_like(tokens, IGNORED))

    def _of_batch(self, batch: Batch) -> "_Counts":
        num_targets = int((batch.targets != IGNORED).sum())
        tensors = self._whole(on_device(batch, self._plan.device))
        if not self._has_examples:
            return _Counts(self._state.model.summed_loss(*tensors), num_targets)
        loss, hits = self._state.model.loss_and_matches(*tensors)
        hits = hits[: len(batch.inputs)]
        self._state.context.world.wait_for_device()
        num_examples, num_exact = _examples_of(batch, hits.cpu())
        return _Counts(loss, num_targets, int(hits.sum()), num_examples, num_exact)

    def _whole(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Filled up with rows that do not count, where another number of rows would be compiled
        again."""
        missing = self._state.settings.training.batch_size - len(tensors[0])
        if not self._state.model.loss.is_compiled or missing <= 0:
            return tensors
        fills = zip(tensors, (0, IGNORED, 0), strict=False)
        return tuple(torch.cat([t, t.new_full((missing, t.shape[1]), f)]) for t, f in fills)

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


@dataclass
class _Counts:
    """What an evaluation adds up."""

    loss: Tensor
    """A sum, float64."""
    num_targets: int = 0
    num_hits: int = 0
    num_examples: int = 0
    num_exact: int = 0

    def add(self, other: "_Counts") -> None:
        self.loss += other.loss
        self.num_targets += other.num_targets
        self.num_hits += other.num_hits
        self.num_examples += other.num_examples
        self.num_exact += other.num_exact

    def told(self) -> Tensor:
        """float64, which holds each count exactly."""
        counts = (self.num_targets, self.num_hits, self.num_examples, self.num_exact)
        return torch.stack([self.loss, *map(self.loss.new_tensor, counts)])


def _evaluation(step: int, split: str, sums: Tensor, seconds: float) -> Evaluation:
    """`sums`: of all ranks, as `_Counts.told`."""
    total, *counts = sums.tolist()  # sync
    num_targets, num_hits, num_examples, num_exact = map(int, counts)
    loss = total / max(1, num_targets)
    return Evaluation(
        step=step,
        split=split,
        loss=loss.hex(),
        perplexity=perplexity(loss),
        tokens=num_targets,
        tokens_per_s=num_targets / max(1e-9, seconds),
        token_accuracy=num_hits / max(1, num_targets) if num_examples else None,
        exact_match=num_exact / num_examples if num_examples else None,
        examples=num_examples or None,
    )


def _examples_of(batch: Batch, hits_BT: Tensor) -> tuple[int, int]:
    """(examples of a batch, those whose targets are all hits). Both on the CPU."""
    rows, time = batch.targets.shape
    numbers_BT = torch.arange(rows)[:, None] * (time + 1)
    if batch.documents is not None:
        numbers_BT = numbers_BT + batch.documents
    counts_BT = batch.targets != IGNORED
    numbers_N = numbers_BT.expand(rows, time)[counts_BT]
    num_targets = torch.bincount(numbers_N, minlength=1)
    num_hits = torch.bincount(numbers_N[hits_BT[counts_BT]], minlength=len(num_targets))
    is_example = num_targets > 0
    return int(is_example.sum()), int((is_example & (num_hits == num_targets)).sum())


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
