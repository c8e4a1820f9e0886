"""Each rank holds the whole model; torch's DDP sums their gradients."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from model_check.dist.peers import heeding_peers
from model_check.dist.ranks import Ranks
from model_check.model import Llama


class Replicas(Ranks):
    """Equal weights on all ranks."""

    _module: nn.parallel.DistributedDataParallel | None = None

    def leave(self) -> None:
        self._module = None
        super().leave()

    def join(self, model: Llama, device: torch.device) -> None:
        # Weights and buffers are equal already: drawn with one seed, or read from one file.
        with warnings.catch_warnings():
            # torch 2.13 prefers another option for buffers, which 2.11 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            ddp = nn.parallel.DistributedDataParallel(
                SummedLoss(model),
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        ddp.register_comm_hook(None, self._sum_bucket)
        self._module = ddp

    def summed_loss(self, model: Llama) -> Callable[..., Tensor]:
        return super().summed_loss(model) if self._module is None else self._module

    @contextmanager
    def reducing(self, is_last: bool) -> Iterator[None]:
        if self._module is None:
            yield
            return
        if is_last:
            self._local = []
        with heeding_peers(), nullcontext() if is_last else self._module.no_sync():
            yield
        if is_last and self._waited is not None:
            self._waited.end()

    def _sum_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Gradients are summed, not averaged: each rank divides its loss by the targets of all."""
        gradients = bucket.buffer()
        self.note_own(gradients)
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None

        def take(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            if self._see_sum is not None:
                for parameter, gradient in pairs:
                    self._see_sum(parameter, gradient)
            return done.value()[0]

        summed: torch.futures.Future[Tensor] = work.get_future().then(take)
        return summed


class SummedLoss(nn.Module):
    """DDP prepares the backward pass of what `forward` gives."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self._model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns Llama.summed_loss of these arguments, a float32 scalar."""
        return self._model.summed_loss(*args, **kwargs)
