"""Notes at each step, on the device, where numbers are not finite: between which blocks, forward
and backward, and in which gradients. They name the block of a fault that never comes again."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NonFiniteSite(NamedTuple):
    """What is not finite at one site: between two modules of a step, forward or backward."""

    made_by: str
    """The module that computed it: `tok_embed`, `layers.3`, `norm`, `loss`."""
    is_forward: bool
    num_nan: int
    """Positions (tokens) with a NaN."""
    num_inf: int
    """Positions with an Inf and no NaN; of two signs they count as a NaN."""
    first: int
    """The first of them, counted through the micro-batches of the step."""


class SiteMonitor:
    """Watches what flows between the blocks of a model. Nothing here waits for the device.

    Of each position it notes the sum, which a NaN or Inf spoils: one pass over a tensor, no copy
    (on a CPU a sixteenth of the time of isfinite). Finite values above 1e34 may spoil it, too.
    """

    def __init__(self, sites: Sequence[str]) -> None:
        """`sites`: the modules whose outputs `see` is called with, in turn."""
        self._makers = sites
        self._forward: list[Tensor] = []
        self._backward: list[Tensor] = []
        """From the last site to the first."""
        self._counts: Tensor | None = None
        self._num_seen = 0

    def begin(self, _step: int) -> None:
        self._counts, self._num_seen = None, 0
        self._forward.clear()
        self._backward.clear()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Adds its positions to the step's counts."""
        sums = torch.stack([*self._forward, *self._backward])
        is_nan, is_inf = sums.isnan(), sums.isinf()
        is_bad = is_nan | is_inf
        first = torch.where(is_bad.any(1), is_bad.int().argmax(1) + self._num_seen, -1)
        counts = torch.stack([is_nan.sum(1), is_inf.sum(1), first])
        if self._counts is not None:
            before = self._counts
            counts[:2] += before[:2]
            counts[2] = torch.where(before[2] >= 0, before[2], first)
        self._counts = counts
        self._num_seen += sums.shape[1]
        self._forward.clear()
        self._backward.clear()

    @property
    def counts(self) -> Tensor:
        """[3, sites] int64, of the step that was computed last: the counts of `NonFiniteSite`."""
        assert self._counts is not None, "a step has a micro-batch"
        return self._counts

    def first_bad(self, counts: Tensor) -> NonFiniteSite | None:
        """Returns the first site that is not finite, in the order of computation, by the `counts`
        of a step, int64 [3, sites] on the host; None where every site is finite."""
        # The gradient of a module's output is made by the module after it.
        makers = [*self._makers, "loss", *reversed(self._makers[1:])]
        for number, maker in enumerate(makers):
            num_nan, num_inf, first = counts[:, number].tolist()
            if first >= 0:
                return NonFiniteSite(maker, number < len(self._makers), num_nan, num_inf, first)
        return None

    def see(self, x_BTE: Tensor) -> None:
        """What a module hands to the next one; of all sites in turn."""
        self._forward.append(_sums(x_BTE))
        if x_BTE.requires_grad:
            x_BTE.register_hook(self._see_gradient)  # type: ignore[no-untyped-call]

    def _see_gradient(self, gradient: Tensor) -> None:
        self._backward.append(_sums(gradient))


def _sums(x_BTE: Tensor) -> Tensor:
    """[B * T] float32"""
    return x_BTE.detach().sum(-1, dtype=torch.float32).flatten()
