"""What do fingerprints not see? `python -m benchmarks.fingerprint_faults [DRAWS]`.

Draws faults of several values of a tensor by a seed, and computes from the weights alone what each
does to the sum, which is linear: zero is a fault that nobody sees.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np

from model_check.utils.fingerprint import NUM_COLUMNS, column_weight, row_weight

Draws = np.random.Generator
NUM_VALUES = 4_000_000
COLUMNS = np.array([column_weight(c) for c in range(NUM_COLUMNS)], dtype=np.uint64)
ROWS = np.array([row_weight(r) for r in range(-(-NUM_VALUES // NUM_COLUMNS) + 1)], dtype=np.uint64)
BIT_TYPES = {"fp32": np.dtype(np.int32), "bf16": np.dtype(np.int16)}


def weights(elements: np.ndarray) -> np.ndarray:
    return ROWS[elements // NUM_COLUMNS] * COLUMNS[elements % NUM_COLUMNS]


def change(elements: np.ndarray, before: np.ndarray, after: np.ndarray) -> int:
    """Of the sum, modulo 2^64."""
    by = after.astype(np.int64) - before.astype(np.int64)
    return int((weights(elements) * by.view(np.uint64)).sum())


def values(draw: Draws, num: int, bits: np.dtype) -> np.ndarray:
    """Small normal floats, as of a model: neighbours often share their upper bits."""
    floats = draw.normal(0, 0.02, num).astype(np.float32).view(np.int32)
    return floats if bits.itemsize == 4 else (floats >> 16).astype(bits)


def burst(draw: Draws, bits: np.dtype, aligned: bool, flip: Callable[..., np.ndarray]) -> int:
    num = int(draw.integers(2, 65))
    first = int(draw.integers(NUM_VALUES - num))
    elements = first // (32 if aligned else 1) * (32 if aligned else 1) + np.arange(num)
    before = values(draw, num, bits)
    return change(elements, before, before ^ flip(draw, num, bits))


def same_bit(draw: Draws, num: int, bits: np.dtype) -> np.ndarray:
    """One bit of all of them."""
    one = 1 << int(draw.integers(bits.itemsize * 8))
    return np.full(num, one).astype(bits)


def any_bits(draw: Draws, num: int, bits: np.dtype) -> np.ndarray:
    ends = np.iinfo(bits)
    found = draw.integers(ends.min, ends.max, num, dtype=bits, endpoint=True)
    return np.where(found == 0, 1, found).astype(bits)


def two(draw: Draws, near: bool) -> np.ndarray:
    first = int(draw.integers(NUM_VALUES - 64))
    step = int(draw.integers(1, 64)) if near else int(draw.integers(1, NUM_VALUES))
    return np.array([first, (first + step) % NUM_VALUES])


def swap(draw: Draws, bits: np.dtype, near: bool) -> int:
    before = values(draw, 2, bits)
    while before[0] == before[1]:
        before = values(draw, 2, bits)
    return change(two(draw, near), before, before[::-1])


def opposite(draw: Draws, bits: np.dtype, near: bool) -> int:
    """The same amount is added to the bits of one and taken from those of the other."""
    by = int(draw.integers(1, 1 << bits.itemsize * 8 - 2))
    zeros = np.zeros(2, dtype=np.int64)
    return change(two(draw, near), zeros, np.array([by, -by]))


def opposite_flips(draw: Draws, bits: np.dtype, near: bool) -> int:
    """One bit is set here, and the same bit is cleared there; the sign's, too."""
    one = np.array([1 << int(draw.integers(bits.itemsize * 8))]).astype(bits)[0]
    none = bits.type(0)
    return change(two(draw, near), np.array([none, one]), np.array([one, none]))


def swapped_rows(draw: Draws, bits: np.dtype, aligned: bool) -> int:
    """64 neighbours change places with 64 others."""
    unit = NUM_COLUMNS if aligned else 1
    firsts = draw.choice((NUM_VALUES - 64) // unit, 2, replace=False) * unit
    elements = np.concatenate([first + np.arange(64) for first in firsts])
    before = values(draw, 128, bits)
    return change(elements, before, np.roll(before, 64))


def classes() -> Iterator[tuple[str, Callable[..., int]]]:
    for where, aligned in (("32-aligned", True), ("anywhere", False)):
        yield f"burst, one bit, {where}", lambda d, b, a=aligned: burst(d, b, a, same_bit)
        yield f"burst, any bits, {where}", lambda d, b, a=aligned: burst(d, b, a, any_bits)
    for where, near in (("within 64", True), ("anywhere", False)):
        yield f"swap, {where}", lambda d, b, n=near: swap(d, b, n)
        yield f"equal and opposite, {where}", lambda d, b, n=near: opposite(d, b, n)
        yield f"opposite flips, {where}", lambda d, b, n=near: opposite_flips(d, b, n)
    yield "64 swapped, same columns", lambda d, b: swapped_rows(d, b, True)
    yield "64 swapped, anywhere", lambda d, b: swapped_rows(d, b, False)


def main() -> None:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    for dtype, bits in BIT_TYPES.items():
        for name, fault in classes():
            draw = np.random.default_rng(13)
            changes = [fault(draw, bits) for _ in range(num)]
            shared = max((c & -c).bit_length() - 1 for c in changes if c)
            print(f"{dtype} {name:32} unseen {changes.count(0)} of {num}; ", end="")
            print(f"at most {shared} trailing zeros of a change")


if __name__ == "__main__":
    main()
