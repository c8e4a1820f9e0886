"""What an update of one optimizer reads and leaves, and whether that stays until the next one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model_check.forensics.checksums import Change, ChecksumVector, Continuity
from model_check.forensics.fingerprint import Kernel
from model_check.forensics.optimizer import TorchOptimizer, moments_of
from model_check.hooks.fingerprints import READS, Fingerprints, bytes_paid_by

_MOST_SLOTS = 16
"""Steps in which a rotation takes everything once."""
_NUM_SEARCHED = 2
"""Steps after which an optimizer has all kinds of state that it will have."""


@dataclass(frozen=True)
class Updated:
    """An update that was just enqueued."""

    vector: ChecksumVector
    grad_norms: Tensor
    """float32 [parameters]"""
    written: frozenset[str]
    """`WatchedUpdate.written_now`, as the step began."""
    names: list[str]
    """Of the parameters."""


class WatchedUpdate:
    def __init__(
        self,
        optimizer: Optimizer,
        named: dict[str, nn.Parameter],
        kernel: Kernel,
        *,
        num_tokens: int,
        last_step: int | None,
    ) -> None:
        """`num_tokens`: of a step, as far as they are known. `last_step`: takes everything."""
        self.seen = TorchOptimizer(named.items(), optimizer)
        self._owners = parameters_of(optimizer)
        budget = _budget_bytes(self._owners, kernel, num_tokens)
        last = -1 if last_step is None else last_step
        self._fingerprints = Fingerprints(
            None, self.seen, kernel, sites=(), budget_bytes=budget, last_step=last
        )
        self._layout = self.seen.layout
        self._continuity = Continuity()
        self._num_done = 0
        self._norms: Tensor | None = None
        """Of the gradients of this step, which were taken; None: they are to be taken."""
        self._versions: dict[str, int] = {}
        self._written: frozenset[str] = frozenset()
        self._unread: dict[str, bool] = {}
        """What has no fingerprint -> whether that was told."""

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still updates the same parameters."""
        owners = parameters_of(optimizer)
        return len(owners) == len(self._owners) and all(map(_is, owners, self._owners))

    def take(self) -> None:
        """The gradients are whole, and nobody has clipped them. Once a step."""
        if self._norms is not None:
            return
        self._fingerprints.begin(self._num_done)
        self._renew()
        self._fingerprints.begin_update()
        (block,) = self.seen.blocks
        self._fingerprints.before(0, block.gradients())
        self._norms, self._written = self.seen.grad_norms(), self.written_now()

    def drop(self) -> None:
        """More is added to the gradients: they were not whole."""
        self._norms = None

    def end(self) -> Updated | None:
        """The update is done. None: it had no gradients to look at."""
        if self._norms is None:
            return None
        self._renew()
        self._fingerprints.after(0)
        vector, norms = self._fingerprints.end_update(self._norms), self._norms
        if self._num_done < _NUM_SEARCHED:
            self._unread = dict.fromkeys(self.seen.unread, False) | self._unread
        self._num_done, self._norms = self._num_done + 1, None
        self._versions = {name: p._version for name, p in self.seen.named.items()}
        return Updated(vector, norms, self._written, list(self.seen.named))

    def changed(self, vector: ChecksumVector) -> Change | None:
        """Returns what the step found otherwise than the update before had left it. `vector`: of
        the step, on the host."""
        found = self._continuity.changed(vector)
        self._continuity.update(vector)
        return found

    def written_now(self) -> frozenset[str]:
        """Returns the weights that an operator wrote since the update, and those of one value:
        there one bit more or less may be a write past the operators, as of a clamped scale."""
        named, versions = self.seen.named.items(), self._versions
        return frozenset(n for n, p in named if versions.get(n) != p._version or p.numel() == 1)

    def changed_now(self) -> Change | None:
        """The same of the state as it is now, which the latest update left."""
        return self._continuity.changed_now(self._fingerprints.of_state_now())

    def unread(self) -> list[str]:
        """Returns, once, what has no fingerprint."""
        untold = [name for name, is_told in self._unread.items() if not is_told]
        self._unread |= dict.fromkeys(untold, True)
        return untold

    def kept(self) -> dict[str, Tensor]:
        """By the names of a dossier."""
        weights = {f"weights/{name}": p.detach() for name, p in self.seen.named.items()}
        return weights | {f"{kind}/{name}": x for kind, name, x in moments_of(self.seen)}

    def _renew(self) -> None:
        if (layout := self.seen.layout) != self._layout:
            self._layout = layout
            self._fingerprints.renew()


def _budget_bytes(
    parameters: Sequence[nn.Parameter], kernel: Kernel, num_tokens: int
) -> float | None:
    """Returns what the fingerprints of a step may read: 1 % of its time, where a token takes six
    operations for each parameter, and not so little that a rotation would be long. None: all, as
    the kernel for a CPU does, whose steps are slow."""
    if kernel.name == "c":
        return None
    flops = 6.0 * num_tokens * sum(p.numel() for p in parameters)
    num_bytes = READS * sum(p.nbytes for p in parameters)
    return max(bytes_paid_by(flops, kernel, parameters[0].device), num_bytes / _MOST_SLOTS)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is(one: object, other: object) -> bool:
    return one is other


def device_of(optimizer: Optimizer) -> torch.device:
    return next((p.device for p in parameters_of(optimizer)), torch.device("cpu"))
