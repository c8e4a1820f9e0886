"""The loss on validation splits. It leaves the training state as it was."""

import math
import sys
import time
from collections.abc import Iterable, Iterator

import msgspec
import torch
from torch import Tensor

from model_check.data.read.loader import Batch
from model_check.engine.state import TrainingState
from model_check.engine.uncompiled import untouched
from model_check.events import Evaluation
from model_check.hooks.hook import Periodic
from model_check.hooks.lockstep import SupervisorClient
from model_check.hooks.save import Save
from model_check.model import IGNORED
from model_check.train import StepContext, on_device
from model_check.utils.checkpoint_names import BEST


class Evaluate(Periodic):
    """Evaluates every split. Before `Save`: a checkpoint knows the best loss."""

    def __init__(
        self,
        state: TrainingState,
        context: StepContext,
        save: Save,
        client: SupervisorClient,
    ) -> None:
        training = state.settings.training
        super().__init__(training.eval_interval)
        self._state, self._context, self._client = state, context, client
        self._save, self._saves_best = save, training.save_best
        self._splits = state.context.splits
        self._has_examples = state.settings.training.stage == "prompt_target"
        self._best_split = training.best_split or next(iter(self._splits), None)

    def between_steps(self, num_done: int) -> None:
        is_best = False
        with self._state.phase("eval"):
            for evaluation in self.evaluate(num_done):
                is_best |= evaluation.best
                for observer in self._state.observers:
                    observer.on_evaluation(evaluation)
        if is_best and self._saves_best:
            self._save.save(BEST, num_done)

    def evaluate(self, num_done: int) -> Iterator[Evaluation]:
        """Yields each split's evaluation."""
        for name, batches in self._splits.items():
            yield self._noted(self._evaluate(name, batches(), num_done))

    def _evaluate(self, name: str, batches: Iterable[Batch], num_done: int) -> Evaluation:
        started = time.monotonic()
        loss = torch.zeros((), dtype=torch.float64, device=self._context.device)
        counts = torch.zeros(4, dtype=torch.int64)
        world, model = self._context.world, self._state.model
        # One forward context for all batches: no weight changes, and none is cast again.
        with untouched(model), world.computing(), self._context.forward_context():
            for batch in world.in_step(batches):
                self._client.check_in()
                own_loss, own_counts = self._of_batch(batch or self._empty_batch())
                if batch is not None:
                    loss += own_loss
                    counts += own_counts
        world.settle(model)
        world.meet(self._client.check_in)
        # float64 holds each count exactly.
        sums = world.summed(torch.cat([loss[None], counts.to(loss)]))
        world.wait_for_device()
        return _evaluation(num_done, name, sums, time.monotonic() - started)

    def _empty_batch(self) -> Batch:
        """Of no targets: for a rank that has no more, and computes with those that have."""
        tokens = torch.zeros(1, self._state.settings.training.context_length, dtype=torch.int64)
        return Batch(tokens, torch.full_like(tokens, IGNORED))

    def _of_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the summed loss, a scalar, and int64 [4] on the CPU: its targets, those that are
        the likeliest token, its examples, those of which each target is."""
        num_targets = int((batch.targets != IGNORED).sum())
        tensors = self._whole(on_device(batch, self._context.device))
        if not self._has_examples:
            return self._state.model.summed_loss(*tensors), torch.tensor([num_targets, 0, 0, 0])
        loss, hits = self._state.model.loss_and_matches(*tensors)
        hits = hits[: len(batch.inputs)]
        self._state.context.world.wait_for_device()
        num_examples, num_exact = _examples_of(batch, hits.cpu())
        return loss, torch.tensor([num_targets, int(hits.sum()), num_examples, num_exact])

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


def _evaluation(step: int, split: str, sums: Tensor, seconds: float) -> Evaluation:
    """`sums`: of all ranks, float64 [5]: the loss, and the counts of `_of_batch`."""
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
