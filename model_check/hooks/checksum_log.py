"""Fingerprints of steps: the name of each number, the roll-ups of a step, the vectors of the last
steps, and whether state stays as an update left it."""

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from model_check.engine.results import StepMetrics
from model_check.events import Break, Vectors
from model_check.forensics.fingerprint import as_int64
from model_check.utils.fingerprint import BEFORE, flipped, weight

NUM_KEPT = 8
"""Steps whose vectors stay: more than workers may be apart."""
_NUM_INDICES = 1024
"""A run needs a few for each slot of a rotation."""
_PASSES = ("forward", "backward", "gradients")
"""What depends on weights and data alone."""
_MODULUS = 1 << 64


@dataclass(frozen=True)
class ChecksumKey:
    """Names one fingerprint."""

    quantity: str
    tensor: str
    """A parameter, a buffer, or the module whose output flows; `NAME[FIRST:END]` is a part."""
    num_values: int
    num_bits: int
    """Bits of a value; 0: this is no sum, and nothing tells which value differs."""


@dataclass(frozen=True, eq=False)
class ChecksumIndex:
    """Names the numbers of a vector. Many steps share one, so it is compared by identity, and what
    follows from it is computed once."""

    keys: tuple[ChecksumKey, ...]

    def roll_ups(self, values: Tensor) -> dict[str, str]:
        """One number for each quantity, 16 hex digits: the sum, modulo 2^64, of its fingerprints
        times weights 0, 1, ... of splitmix64. `values`: int64 [keys], on the host."""
        quantities, numbers, weights = self._rolling
        sums = torch.zeros(len(quantities), dtype=torch.int64)
        sums.index_add_(0, numbers, values * weights)
        rolled = (f"{value % _MODULUS:016x}" for value in sums.tolist())
        return dict(zip(quantities, rolled, strict=True))

    @cached_property
    def _rolling(self) -> tuple[list[str], Tensor, Tensor]:
        """Returns the quantities, int64 [keys] the number of each key's quantity, and int64 [keys]
        its weight among the keys of that quantity."""
        members: dict[str, list[int]] = {}
        for number, key in enumerate(self.keys):
            members.setdefault(key.quantity, []).append(number)
        numbers = torch.empty(len(self.keys), dtype=torch.int64)
        weights = torch.empty_like(numbers)
        for number, own in enumerate(members.values()):
            numbers[own] = number
            weights[own] = as_int64([weight(n) for n in range(len(own))])
        return [*members], numbers, weights


@dataclass(frozen=True)
class ChecksumVector:
    """The fingerprints of a step."""

    index: ChecksumIndex
    values: Tensor
    """int64 [keys]"""
    taken: str = ""
    """The slot of the state before the update, and of that after it: `all`, or a number."""
    step: int = -1
    """-1: taken before the first step."""

    @cached_property
    def roll_ups(self) -> dict[str, str]:
        """As those of the index. The values must lie on the host, here and below."""
        return self.index.roll_ups(self.values)

    @cached_property
    def numbers(self) -> dict[ChecksumKey, int]:
        """The fingerprints, unsigned, in the order of the keys."""
        values = (number % _MODULUS for number in self.values.tolist())
        return dict(zip(self.index.keys, values, strict=True))

    def of(self, quantities: tuple[str, ...]) -> dict[ChecksumKey, int]:
        return {key: value for key, value in self.numbers.items() if key.quantity in quantities}

    def as_event(self) -> Vectors:
        found: dict[str, dict[str, str]] = {}
        for key, value in self.numbers.items():
            found.setdefault(key.quantity, {})[key.tensor] = f"{value:016x}"
        sizes = {key.tensor: (key.num_values, key.num_bits) for key in self.numbers if key.num_bits}
        return Vectors(step=self.step, fp=found, sizes=sizes)


def joined(*vectors: ChecksumVector) -> ChecksumVector:
    index = index_of_all(*(own.index for own in vectors))
    return ChecksumVector(index, torch.cat([own.values for own in vectors]))


@lru_cache(_NUM_INDICES)
def index_of_all(*indices: ChecksumIndex) -> ChecksumIndex:
    return ChecksumIndex(tuple(key for index in indices for key in index.keys))


@lru_cache(_NUM_INDICES)
def index_of(keys: tuple[ChecksumKey, ...]) -> ChecksumIndex:
    return ChecksumIndex(keys)


class ChecksumLog:
    """The fingerprints of one worker."""

    def __init__(self) -> None:
        self._kept: deque[ChecksumVector] = deque(maxlen=NUM_KEPT)
        self._first: dict[ChecksumKey, int] = {}
        """Of the first step, when it was computed before it."""
        self._of_first: tuple[str, float | None] = "", None
        """Its loss, exact, and the scale of that."""
        self._left: ChecksumVector | None = None
        """What the last update left is among these."""
        self.repeated: bool | None = None
        """Whether the latest step, if it is the first, gave the same bits as before it."""

    @property
    def roll_ups(self) -> dict[str, str]:
        """Of the latest step."""
        return self._kept[-1].roll_ups if self._kept else {}

    @property
    def taken(self) -> str:
        """Which tensors the roll-ups cover."""
        return self._kept[-1].taken if self._kept else ""

    def begin(
        self, vector: ChecksumVector, loss: float = 0.0, loss_scale: float | None = None
    ) -> None:
        """`vector`: of the state that the first step begins with, and of both its passes, where
        they were computed once before it: they gave this loss, of this rank, at this loss scale."""
        index, values = _as_left(vector.index), vector.values.cpu()
        self._left = replace(vector, index=index, values=values)
        self._first = self._left.of(_PASSES)
        self._of_first = loss.hex(), loss_scale

    def take(self, metrics: StepMetrics, vector: ChecksumVector) -> None:
        """A step that was just read; `vector`: of it, on the host."""
        self.repeated = None
        # Where it overflowed it was trained again at a smaller scale.
        loss, scale = self._of_first
        is_same = self._first and metrics.loss_scale == scale
        if is_same and self._changed(vector) is None:  # from the same state
            own = metrics.loss if metrics.own_loss is None else metrics.own_loss
            self.repeated = self._first == vector.of(_PASSES) and own.hex() == loss
        self._first = {}
        self._kept.append(vector)

    def check(self) -> Break | None:
        """Whether the latest step found its state as the update before had left it."""
        if not self._kept:
            return None
        found = self._changed(self._kept[-1])
        self._left = self._kept[-1]
        return found

    def check_state(self, vector: ChecksumVector) -> Break | None:
        """The same for the state now, behind the latest step."""
        if self._left is None or self._left.step < 0:
            return None
        return self._changed(replace(vector, values=vector.values.cpu(), step=self._left.step + 1))

    def vectors(self, step: int) -> Vectors:
        """Without fingerprints where the step is not kept any more."""
        found = (vector for vector in self._kept if vector.step == step)
        return next((vector.as_event() for vector in found), Vectors(step=step))

    @property
    def last_vectors(self) -> Vectors | None:
        """Of the latest step; None: no fingerprints are taken."""
        return self._kept[-1].as_event() if self._kept and self._kept[-1].numbers else None

    def _changed(self, now: ChecksumVector) -> Break | None:
        if (left := self._left) is None:
            return None
        was, again = _taken_twice(left.index, now.index)
        changed = (left.values[was] != now.values[again]).nonzero().flatten().tolist()
        if not changed:
            return None
        first = changed[0]
        key = left.index.keys[was[first]]
        before, after = int(left.values[was[first]]), int(now.values[again[first]])
        return Break(
            step=now.step,
            quantity=key.quantity,
            tensor=key.tensor,
            num_tensors=len(changed),
            since=None if left.step < 0 else left.step,
            found=flipped(before, after, key.num_values, key.num_bits),
        )


def _as_left(index: ChecksumIndex) -> ChecksumIndex:
    """What an update begins with, as if one had left it."""
    left = (replace(key, quantity=key.quantity.removeprefix(BEFORE)) for key in index.keys)
    return ChecksumIndex(tuple(left))


@lru_cache(_NUM_INDICES)
def _taken_twice(left: ChecksumIndex, now: ChecksumIndex) -> tuple[Tensor, Tensor]:
    """The numbers of what an update left, and of the same tensors before the next one."""
    places = {(key.quantity, key.tensor): number for number, key in enumerate(left.keys)}
    pairs = [
        (places[place], number)
        for number, key in enumerate(now.keys)
        if key.quantity.startswith(BEFORE)
        and (place := (key.quantity.removeprefix(BEFORE), key.tensor)) in places
    ]
    was, again = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return was, again
