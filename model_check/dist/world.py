"""What our loop asks of the ranks of one training job. A process that trains alone is a world of
one, and asks nobody."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from model_check.engine.busy import Waited
from model_check.errors import PeerLost
from model_check.forensics.origin import Hook, hooked
from model_check.model import Llama

T = TypeVar("T")


BAD_STEP = -1
"""What a rank tells first, in the place of what it counts, whose last step was not finite."""


class OwnState(IntEnum):
    """Of the weights that lie on a rank, where its last step was not finite."""

    FINITE = 0
    NOT_FINITE = 1
    CHANGED = 2
    """By itself, and it is finite."""


def of_bad_step(state: OwnState = OwnState.FINITE) -> tuple[int, int, int]:
    """What a rank offers that has such a step."""
    return BAD_STEP, int(state), 0


def refuse_bad_peer(told: Iterable[Sequence[int]]) -> None:
    """Raises PeerLost where a rank has a step that is not finite, for this one goes on."""
    if any(first == BAD_STEP for first, *_ in told):
        raise PeerLost("another rank has found its last step not finite, and this one has not")


class World:
    """One process, alone."""

    rank = 0
    size = 1
    node = 0
    """The number of its machine among those of the job."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    beat: Callable[[], None] = staticmethod(lambda: None)
    """Called each BEAT_S of a wait for others that may be long: this rank does not hang."""

    _see_sum: Callable[[Tensor, Tensor], None] | None = None

    is_sharded = False
    """Whether each rank holds a part of the model, and computes nothing without the others."""

    is_offloaded = False
    """Whether weights, gradients and moments lie in the host's memory."""
    shard_name = ""
    """`1 of 2`; the same on ranks with equal shards. Empty: it holds the model whole."""

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
        """Divide a model on device `meta` among the ranks. Its values are undefined then."""

    def join(self, model: Llama, device: torch.device) -> None:
        """From now on the gradients of `model` are those of all ranks."""

    def summed_loss(self, model: Llama) -> Callable[..., Tensor]:
        """Returns what a training step calls for `model.summed_loss`, with the same arguments and
        result: a float32 scalar of this rank. It is asked once a step: what is noted of this rank's
        own gradients begins anew."""
        return model.summed_loss

    def computing(self) -> AbstractContextManager[object]:
        """Around passes of no step, or of several micro-batches."""
        return nullcontext()

    def reducing(self, is_last: bool) -> AbstractContextManager[object]:
        """Around both passes of a micro-batch. In the last one of a step gradients are summed over
        the ranks."""
        return nullcontext()

    @property
    def waited(self) -> Waited | None:
        """In the latest step, from its own last gradient to the sum of all; None: alone."""
        return None

    def own_bad(self) -> Tensor | None:
        """Returns a bool scalar on the device: whether this rank's own gradients of the step were
        not finite, before they were summed. None: nothing was summed."""
        return None

    def norms(self, norms: Tensor) -> Tensor:
        """Returns the norms of whole gradients, float32 [parameters], from those of what lies here.
        Raises PeerLost."""
        return norms

    def whole(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns a copy of `tensors`, parameters of one shape and dtype, stacked and whole:
        [number, *shape]. All ranks must ask. Raises PeerLost."""
        return torch.stack(list(tensors))

    def hooked(self, model: nn.Module, hooks: Mapping[str, Hook]) -> ExitStack:
        """As forensics.origin.Hooked: of gradients before they are summed."""
        return hooked(model, hooks)

    def in_step(self, batches: Iterable[T]) -> Iterator[T | None]:
        """Batches that ranks compute together, where none can do it without the others; None: this
        rank has no more, and others have."""
        yield from batches

    @contextmanager
    def seeing_sums(self, see: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """Calls `see` inside with each parameter and its live gradient when that is summed over the
        ranks: float32 in the parameter's shape, of a sharded one the rows that lie here. A process
        alone sums nothing."""
        self._see_sum = see
        try:
            yield
        finally:
            self._see_sum = None

    def settle(self, model: nn.Module) -> None:
        """Passes without a step are over."""

    def tell_saving(self, error: BaseException, steps: int, num_bytes: int) -> None:
        """This rank is about to end of that, after so many steps, and saves so many bytes of
        evidence first."""

    def summed(self, value: Tensor) -> Tensor:
        """Sums `value` (any shape and dtype, the same on all ranks) over the ranks in place, and
        returns it. Raises PeerLost."""
        return value

    def of_first(self, value: Tensor) -> Tensor:
        """Returns `value` of the first rank; all give tensors of one shape and dtype, and none is
        changed. Raises PeerLost."""
        return value

    def offer(self, *numbers: int) -> "Offer":
        """Tell all ranks these numbers, now; what they tell is known later."""
        return Offer([list(numbers)])

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, in their order. Raises PeerLost."""
        return [value]

    def meet(self, meanwhile: Callable[[], None]) -> None:
        """Return when every rank is here: they may have written a checkpoint. Raises PeerLost."""

    def wait_for_device(self) -> None:
        """Return when it has done all that was enqueued by now. Raises PeerLost."""

    def wait_for_event(self, event: torch.cuda.Event) -> None:
        """Return when the device has come so far. Raises PeerLost."""
        event.synchronize()  # sync

    def expect(self, step_s: float) -> None:
        """Steps take about so long: who waits longer for a peer gives it up."""


ALONE = World()


class Offer:
    """Numbers on their way to all ranks."""

    def __init__(self, told: list[list[int]]) -> None:
        self._told = told

    def take(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """What each rank has offered, in their order. `meanwhile` is called each BEAT_S of a long
        wait. Raises PeerLost."""
        return self._told
