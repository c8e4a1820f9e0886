"""The training loop: forward, loss, backward, clip, update. All else that a run does is a hook of
it (`hooks/`); `engine.hook_list` says why they have their order."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from model_check.data.read.loader import Batch
from model_check.dist.world import ALONE, World, refuse_bad_peer
from model_check.engine.busy import Busy
from model_check.engine.results import AsyncMetrics, OwnShare, StepData, StepMetrics, StepResult
from model_check.hooks.hook import Hook
from model_check.model import IGNORED, Llama
from model_check.optim import AdamW, UpdateWatcher, judge


class BatchSource(Protocol):
    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Endless batches from sequence `start` on, in a fixed order. Closing the generator ends
        its threads."""


class Watcher(Protocol):
    """Watches the passes of a step."""

    def begin(self, step: int) -> None:
        """The passes of a step begin, perhaps once more."""

    def see(self, x_BTE: Tensor) -> None:
        """A module hands this to the next one: called for each site between blocks in turn."""

    def end_micro_batch(self) -> None:
        """Both passes of a micro-batch are over."""


@dataclass(frozen=True)
class StepContext:
    """What does not change from step to step."""

    model: Llama
    optimizer: AdamW
    device: torch.device
    dtype: torch.dtype
    """Of matrix products."""
    max_grad_norm: float | None = None
    world: World = ALONE
    watchers: Sequence[Watcher] = ()
    update_watcher: UpdateWatcher | None = None
    """Sees each block of an update, before and after it."""

    def forward_context(self) -> AbstractContextManager[object]:
        """Autocast, which casts each weight once until it ends: none may change inside."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


class Trainer:
    """Trains from step `first_step` to `num_steps`."""

    def __init__(
        self,
        context: StepContext,
        source: BatchSource,
        hooks: Sequence[Hook],
        *,
        num_micro_batches: int,
        first_sequence: int,
        first_step: int,
        num_steps: int,
        lag: int,
        learning_rate: Callable[[int], float],
        repeat_overflow: Callable[[StepMetrics, "Trainer"], StepMetrics],
        is_asked_to_end: Callable[[], bool],
        meanwhile: Callable[[], None],
    ) -> None:
        """`num_micro_batches`: of a step, each one batch of `source`, which begins at
        `first_sequence`. `lag`: see AsyncMetrics. `learning_rate`: of a step. `repeat_overflow`:
        trains a step again, whose gradients overflowed in float16. `meanwhile`: called while this
        rank waits long for others."""
        self.context, self.hooks = context, hooks
        self.num_done, self.num_steps = first_step, num_steps
        self._source, self._first_sequence = source, first_sequence
        self._stream: Iterator[Batch] = iter(())
        self._num_micro_batches = num_micro_batches
        self._metrics = AsyncMetrics(lag, context.world)
        self._learning_rate, self._repeat_overflow = learning_rate, repeat_overflow
        self._is_asked_to_end, self._meanwhile = is_asked_to_end, meanwhile

    def run(self) -> int:
        """Returns how many steps are done: all of them, or fewer where a rank was asked to end.
        Raises what a hook raises, and PeerLost."""
        with closing(self._source.batches(self._first_sequence)) as stream, ExitStack() as stack:
            self._stream = stream
            for hook in self.hooks:
                stack.push(lambda _kind, error, _at, hook=hook: hook.close(error))
                hook.begin()
            try:
                self._train()
            except Exception as error:
                for hook in self.hooks:
                    hook.on_error(error, self)
                raise
        return self.num_done

    def _train(self) -> None:
        first = self.num_done
        for step in range(first, self.num_steps):
            data = self._gather(step)
            if data.asked_to_end and step > first:
                break
            self._read(self._train_step(data))
            for hook in self.hooks:
                if hook.is_due(self.num_done):
                    self._read(self.flush())  # none may use a step that was not checked yet
                    hook.between_steps(self.num_done)
        self._read(self.flush())
        is_early = self.num_done < self.num_steps
        for hook in self.hooks:
            hook.on_last_step(early=is_early)
        for hook in self.hooks:
            hook.finish(self.num_done, early=is_early)

    def _train_step(self, data: StepData) -> list[StepMetrics]:
        """Returns the metrics that are due behind it."""
        for hook in self.hooks:
            hook.before_step(data)
        return self.compute(data)

    def compute(self, data: StepData) -> list[StepMetrics]:
        """Trains on `data`; returns the metrics that are due behind it."""
        lr = self._learning_rate(data.step)
        result = train_step(self.context, data, lr, self.hooks)
        self.num_done = data.step + 1
        data.busy.end()
        return self._metrics.push(data, lr, result)

    def _read(self, steps: Sequence[StepMetrics]) -> None:
        for step in steps:
            metrics = self._repeat_overflow(step, self) if step.overflow else step
            for hook in self.hooks:
                hook.on_result(metrics)

    def flush(self) -> list[StepMetrics]:
        return self._metrics.flush()

    def train_unchecked(self) -> None:
        self._train_step(self._gather(self.num_done))

    def _gather(self, step: int) -> StepData:
        return gather(
            self._stream,
            step,
            self._num_micro_batches,
            self.context.device,
            self.context.world,
            is_asked_to_end=self._is_asked_to_end(),
            meanwhile=self._meanwhile,
        )


def train_step(
    context: StepContext, data: StepData, lr: float, hooks: Sequence[Hook] = ()
) -> StepResult:
    """One update over all micro-batches, without a host sync. A step that is not finite leaves
    every weight as it was; so does one whose gradients overflow in float16."""
    optimizer = context.optimizer
    loss, own = _loss_of_all_ranks(accumulate(context, data), context)
    for hook in hooks:
        hook.after_backward(data)
    grad_norms = optimizer.grad_norms()
    found = judge(loss, grad_norms, optimizer.loss_scale)
    optimizer.step(
        lr,
        found.bad,
        found.divisor(context.max_grad_norm),
        skip=found.overflow,
        update_watcher=context.update_watcher,
    )
    result = StepResult(
        loss, found.grad_norm, found.bad, grad_norms, found.overflow, found.loss_scale, own
    )
    for hook in hooks:
        hook.after_update(data, result)
    return result


def accumulate(context: StepContext, data: StepData) -> Tensor:
    """Fill `.grad` with the gradients of the step's mean loss (times the loss scale, where there is
    one), those of all ranks; return this rank's share of that loss, a scalar."""
    context.optimizer.zero_grad()
    for watcher in context.watchers:
        watcher.begin(data.step)
    losses = []
    summed_loss = context.world.summed_loss(context.model)  # once a step: what is noted begins anew
    with context.forward_context():  # one for all micro-batches: the weights are cast once a step
        for number, micro_batch in enumerate(data.micro_batches, start=1):
            with context.world.reducing(number == len(data.micro_batches)):
                losses.append(forward_backward(context, summed_loss, micro_batch, data.num_targets))
    return torch.stack(losses).sum()


def repeat(context: StepContext, data: StepData, search: Watcher) -> Tensor:
    """Compute both passes of a step again, which `search` watches, too; return this rank's share of
    the mean loss, a float32 scalar on the device. Replicas sum nothing: the gradients of this rank
    alone are of interest. Raises PeerLost where ranks share the model."""
    world = context.world if context.world.is_sharded else ALONE
    watchers = (*context.watchers, search)
    return accumulate(replace(context, world=world, watchers=watchers), data)


def audit(context: StepContext, data: StepData) -> Tensor:
    """Compute both passes of the first rank's first micro-batch, alone, whichever rank this is;
    return its share of the mean loss, a float32 scalar. Raises PeerLost."""
    batch = tuple(map(context.world.of_first, data.micro_batches[0]))
    return accumulate(replace(context, world=ALONE), replace(data, micro_batches=[batch]))


def forward_backward(
    context: StepContext,
    summed_loss: Callable[..., Tensor],
    micro_batch: tuple[Tensor, ...],
    num_targets: int,
) -> Tensor:
    """Compute both passes of one micro-batch: add its gradients, and return its share of the step's
    mean loss, over `num_targets` targets: a float32 scalar, detached. `micro_batch`: int64 [B, T]
    each, see `on_device`. `summed_loss`: see Llama.summed_loss; that of a job sums gradients of all
    ranks."""
    scale, num_targets = context.optimizer.loss_scale, max(1, num_targets)
    unscaled = torch.ones((), device=context.device) if scale is None else scale.value
    grad_scale = unscaled / num_targets
    observers = tuple(watcher.see for watcher in context.watchers)
    total = summed_loss(*micro_batch, grad_scale=grad_scale, observers=observers)
    # Within the forward context: the products have their dtypes already.
    with torch.autocast(context.device.type, enabled=False):
        (total * grad_scale).backward()  # type: ignore[no-untyped-call]
    for watcher in context.watchers:
        watcher.end_micro_batch()
    loss: Tensor = total.detach() / num_targets
    return loss


def _loss_of_all_ranks(own_loss: Tensor, context: StepContext) -> tuple[Tensor, OwnShare | None]:
    """Returns the loss of all ranks, a float32 scalar, and what this rank brought in. One sum tells
    both, in each step: if a rank asked the others only after a failure, ranks that saw none would
    not answer, and it would wait for them."""
    world = context.world
    own_bad = world.own_bad()
    if own_bad is None:
        return own_loss, None
    sums = own_loss.new_zeros(1 + world.size)
    sums[0] = own_loss
    sums[1 + world.rank] = own_bad | ~torch.isfinite(own_loss)
    world.summed(sums)
    return sums[0], OwnShare(own_loss, sums[1:], world.waited)


def gather(
    stream: Iterator[Batch],
    step: int,
    num_micro_batches: int,
    device: torch.device,
    world: World = ALONE,
    *,
    is_asked_to_end: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> StepData:
    """The next micro-batches of `stream`, on the device. The ranks exchange what they count, and
    whether they were asked to end. `meanwhile` is called while one waits long for another. Raises
    PeerLost."""
    started = time.perf_counter()
    batches = [next(stream) for _ in range(num_micro_batches)]
    read = time.perf_counter()
    # Counted where the batch lies, on the CPU: no wait for the device.
    counts = (
        sum(b.inputs.numel() for b in batches),
        sum(int((b.targets != IGNORED).sum()) for b in batches),
        int(is_asked_to_end),
    )
    offer = world.offer(*counts)
    micro_batches = [on_device(batch, device) for batch in batches]
    offered = time.perf_counter()
    of_ranks = offer.take(meanwhile)
    refuse_bad_peer(of_ranks)
    num_positions, num_targets, num_asked = map(sum, zip(*of_ranks, strict=True))
    return StepData(
        step=step,
        micro_batches=micro_batches,
        num_positions=num_positions,
        num_targets=num_targets,
        wait_s=read - started,
        wait_for_ranks_s=time.perf_counter() - offered,
        asked_to_end=num_asked > 0,
        busy=Busy(device),
    )


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the arguments of Llama.summed_loss: inputs, targets and, where there are any,
    documents, int64 [B, T] each. A batch in page-locked memory is copied without a wait."""
    tensors = (batch.inputs, batch.targets, batch.documents)
    return tuple(t.to(device, non_blocking=True) for t in tensors if t is not None)
