"""Notes at each step, on the device, where numbers are not finite: between which blocks, forward
and backward, and in which gradients. They name the block of a fault that never comes again."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.model import Llama

_NUM_COUNTS = 3
"""Of a site."""


class Noted(NamedTuple):
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


class Watch:
    """Watches what flows between the blocks of a model. Nothing here waits for the device.

    Of each position it notes the sum, which a NaN or Inf spoils: one pass over a tensor, no copy
    (on a CPU a sixteenth of the time of isfinite). Finite values above 1e34 may spoil it, too.
    """

    def __init__(self, model: Llama) -> None:
        self._makers = ["tok_embed", *(f"layers.{n}" for n in range(len(model.layers))), "norm"]
        self._forward: list[Tensor] = []
        self._backward: list[Tensor] = []
        """From the last site to the first."""
        self._notes: Tensor | None = None
        self._num_seen = 0

    def begin(self) -> None:
        """A step begins."""
        self._notes, self._num_seen = None, 0
        self._forward.clear()
        self._backward.clear()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Adds its positions to the step's notes."""
        sums = torch.stack([*self._forward, *self._backward])
        is_nan, is_inf = sums.isnan(), sums.isinf()
        is_bad = is_nan | is_inf
        first = torch.where(is_bad.any(1), is_bad.int().argmax(1) + self._num_seen, -1)
        notes = torch.stack([is_nan.sum(1), is_inf.sum(1), first])
        if self._notes is not None:
            before = self._notes
            notes[:2] += before[:2]
            notes[2] = torch.where(before[2] >= 0, before[2], first)
        self._notes = notes
        self._num_seen += sums.shape[1]
        self._forward.clear()
        self._backward.clear()

    def details(self, grad_norms: Tensor) -> Tensor:
        """[3 * sites + parameters] float32, of the step that was computed last: the counts of
        `Noted` at each site, then each gradient's norm."""
        assert self._notes is not None, "a step has a micro-batch"
        return torch.cat([self._notes.flatten().float(), grad_norms.float()])

    def first_noted(self, details: Tensor) -> Noted | None:
        """What the details of a step, on the host, tell of the first site that is not finite, in
        the order of computation; None: every site is finite."""
        # The gradient of a module's output is made by the module after it.
        makers = [*self._makers, "loss", *reversed(self._makers[1:])]
        notes = details[: _NUM_COUNTS * len(makers)].view(_NUM_COUNTS, -1)
        for number, maker in enumerate(makers):
            num_nan, num_inf, first = map(int, notes[:, number].tolist())
            if first >= 0:
                return Noted(maker, number < len(self._makers), num_nan, num_inf, first)
        return None

    def bad_norms(self, details: Tensor) -> list[int]:
        """The numbers of the parameters whose gradients' norms are not finite."""
        norms = details[_NUM_COUNTS * 2 * len(self._makers) :]
        return [number for number, norm in enumerate(norms.tolist()) if not math.isfinite(norm)]

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
