"""Fingerprints of a step as a vector: the name of each number, the roll-ups, and whether state is
what an update left. It needs torch alone."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.forensics.fingerprint import as_int64
from model_check.utils.fingerprint import BEFORE, flipped, weight

NUM_KEPT = 8
"""Steps whose vectors a worker keeps: more than workers may be apart."""
_NUM_INDICES = 1024
"""A run needs a few for each slot of a rotation."""
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

    def as_told(self) -> dict[str, dict[str, str]]:
        """Quantity -> tensor -> fingerprint, 16 hex digits."""
        told: dict[str, dict[str, str]] = {}
        for key, value in self.numbers.items():
            told.setdefault(key.quantity, {})[key.tensor] = f"{value:016x}"
        return told

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Tensor -> its values, and bits of a value."""
        return {key.tensor: (key.num_values, key.num_bits) for key in self.numbers if key.num_bits}


def joined(*vectors: ChecksumVector) -> ChecksumVector:
    index = index_of_all(*(own.index for own in vectors))
    return ChecksumVector(index, torch.cat([own.values for own in vectors]))


@lru_cache(_NUM_INDICES)
def index_of_all(*indices: ChecksumIndex) -> ChecksumIndex:
    return ChecksumIndex(tuple(key for index in indices for key in index.keys))


@lru_cache(_NUM_INDICES)
def index_of(keys: tuple[ChecksumKey, ...]) -> ChecksumIndex:
    return ChecksumIndex(keys)


class Change(NamedTuple):
    """State that is not what an update left."""

    step: int
    """The one that found it so."""
    quantity: str
    tensor: str
    """The first of them."""
    num_tensors: int
    since: int | None
    """The step whose update left it; None: it was so before the first."""
    found: list[tuple[int, int]]
    """(element, bit) of the flipped bit; none: more than one bit."""


class Continuity:
    """Whether state stays as an update left it, from one step to the next."""

    def __init__(self) -> None:
        self._left: ChecksumVector | None = None
        """What the last update left is among these."""

    def begin(self, vector: ChecksumVector) -> ChecksumVector:
        """`vector`: of the state that the first step begins with. Returns it as an update would
        have left it, on the host."""
        index, values = _as_left(vector.index), vector.values.cpu()
        self._left = replace(vector, index=index, values=values)
        return self._left

    def changed(self, now: ChecksumVector) -> Change | None:
        """Returns what of the state that a step begins with is not what the update before left.
        `now`: on the host."""
        if (left := self._left) is None:
            return None
        was, again = _taken_twice(left.index, now.index)
        changed = (left.values[was] != now.values[again]).nonzero().flatten().tolist()
        if not changed:
            return None
        first = changed[0]
        key = left.index.keys[was[first]]
        before, after = int(left.values[was[first]]), int(now.values[again[first]])
        return Change(
            step=now.step,
            quantity=key.quantity,
            tensor=key.tensor,
            num_tensors=len(changed),
            since=None if left.step < 0 else left.step,
            found=flipped(before, after, key.num_values, key.num_bits),
        )

    def update(self, vector: ChecksumVector) -> None:
        """The next step begins with what this one left."""
        self._left = vector

    def changed_now(self, vector: ChecksumVector) -> Change | None:
        """As `changed`, of the state as it is now, behind the latest step."""
        if self._left is None or self._left.step < 0:
            return None
        return self.changed(replace(vector, values=vector.values.cpu(), step=self._left.step + 1))


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
