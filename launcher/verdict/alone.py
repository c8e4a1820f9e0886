"""Who is alone with other bits, and when a fault that comes again is its device's. Pure.

Workers that compute the same must give the same bits, in each pass. A worker that gives other bits
than most, or is the only one whose own passes differ, is alone. Where the passes of several differ,
their kernels vary, and no difference proves anything.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from enum import Enum, auto
from math import comb
from typing import TypeVar

from msgspec import Struct

Who = TypeVar("Who")
MAX_CHANCE = 0.001
"""With this probability, or a smaller one, a kernel that varies on all alike looks like the fault
of one device."""
NUM_CLEAN = 3
"""After so many passes that are all right the fault is taken not to come again."""
MAX_PASSES = 12
"""No more are computed: `Tally`."""


class Standing(Enum):
    EQUAL = auto()
    NAMED = auto()
    VARY = auto()
    UNSETTLED = auto()


class Answer(Struct, frozen=True):
    standing: Standing
    workers: tuple[str, ...] = ()
    """Those that are named, or that vary; where it is unsettled nobody."""


def who_is_alone(passes: Mapping[str, Sequence[str]]) -> Answer:
    """`passes`: worker -> the bits of each of its passes over the same computation."""
    varying = tuple(name for name, bits in passes.items() if len(set(bits)) > 1)
    if len(varying) > 1 or len(varying) == len(passes):
        return Answer(Standing.VARY, varying) if varying else Answer(Standing.EQUAL)
    bits = {name: each[0] for name, each in passes.items() if name not in varying}
    odd = minority(bits)
    if varying or odd:
        named = (name for name in passes if name in odd or name in varying)
        return Answer(Standing.NAMED, tuple(named))
    return Answer(Standing.EQUAL if len(set(bits.values())) == 1 else Standing.UNSETTLED)


def is_majority(votes: int, num: int) -> bool:
    """A strict one, of `num` that have a vote."""
    return 2 * votes > num


def minority(bits: Mapping[Who, Hashable]) -> Set[Who]:
    """The workers (nodes, rounds) that differ from a strict majority; none where there is none."""
    value, votes = Counter(bits.values()).most_common(1)[0]
    if not is_majority(votes, len(bits)):
        return set()
    return {worker for worker, each in bits.items() if each != value}


class Tally(Struct, frozen=True):
    """Passes of a suspect over the step of its fault, and of the healthy workers, all right."""

    wrong: int
    """Of the suspect's `times`."""
    times: int
    right: int
    """Passes of the healthy ones."""
    num_healthy: int

    @property
    def chance(self) -> float:
        """That all wrong passes are the suspect's, if each pass is as likely to be wrong, whoever
        computes it: C(times, wrong) / C(times + right, wrong) (Fisher's exact test, one-sided)."""
        return comb(self.times, self.wrong) / comb(self.times + self.right, self.wrong)

    @property
    def convicts(self) -> bool:
        return self.wrong > 0 and self.chance <= MAX_CHANCE

    @property
    def is_open(self) -> bool:
        """Whether one more pass of all can tell more."""
        if self.convicts or self.times >= MAX_PASSES:
            return False
        if self.times < NUM_CLEAN:
            return True
        left = MAX_PASSES - self.times
        right = self.right + left * self.num_healthy
        at_worst = Tally(self.wrong + left, MAX_PASSES, right, self.num_healthy)
        return self.wrong > 0 and at_worst.convicts
