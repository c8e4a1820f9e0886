"""Fingerprints of tensors: the sum, modulo 2^64, of each value's bits times its position's weight.

The bits of a value are read as a signed integer of its width. The values of a tensor, in their
order in memory, fill rows of 1024; the weight of a value is the product of its row's and its
column's, which are odd numbers of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, OOPSLA 2014, figure 16). Integers add up the same in any order, so CPU and GPU
agree. One flipped bit b changes the sum by its weight times 2^b: never by nothing, and the change
tells which bit and which value.
"""

from collections.abc import Iterable, Iterator, Sequence

SCHEMA = 1
"""Sums of another schema cannot be compared."""
NUM_COLUMNS = 1024
QUANTITIES = (
    "audit",
    "inputs",
    "before.weights",
    "before.exp_avg",
    "before.exp_avg_sq",
    "forward",
    "loss",
    "backward",
    "gradients",
    "grad_norms",
    "grad_norm",
    "exp_avg",
    "exp_avg_sq",
    "weights",
)
"""What is compared of a step, causes before effects. `audit`: the gradients of one micro-batch that
all ranks of a job computed before the step; `inputs`: what a command's own model is called with;
`before`: what the update begins with; forward and backward: what flows between blocks; the last
three: what the update leaves. Loss and grad_norm are floats, grad_norms the bits of each gradient's
norm; all others have a fingerprint for each tensor."""
BEFORE, INPUTS = "before.", "inputs"
GENERATORS = "rng."
"""Begins the state of a generator of random numbers. It is not compared: it explains differences.
"""
_UPDATES_BEGIN = QUANTITIES.index("forward")
_LABELS = {
    "inputs": "input {} of the model",
    "forward": "the output of {}",
    "backward": "the gradient of the output of {}",
    "gradients": "the gradient of {}",
    "audit": "the gradient of {} in an audit",
    "grad_norms": "the norm of the gradient of {}",
    "weights": "{}",
}
_MODULUS = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15


def is_compared(quantity: str) -> bool:
    return not quantity.startswith(GENERATORS)


def is_given(quantity: str) -> bool:
    """Whether the passes of a step begin with it, and did not compute it."""
    return quantity == INPUTS or quantity.startswith(BEFORE)


def in_order(told: Iterable[str]) -> Sequence[str]:
    """QUANTITIES, and what else was told that is compared, causes before effects: an optimizer
    other than AdamW keeps other state, as `momentum_buffer` and `before.momentum_buffer`."""
    more = sorted(q for q in {*told}.difference(QUANTITIES) if is_compared(q))
    if not more:
        return QUANTITIES
    before = [q for q in more if q.startswith(BEFORE)]
    after = [q for q in more if not q.startswith(BEFORE)]
    flow, left = QUANTITIES[_UPDATES_BEGIN:-1], QUANTITIES[-1]
    return [*QUANTITIES[:_UPDATES_BEGIN], *before, *flow, *after, left]


def weight(number: int) -> int:
    """Number `number` of splitmix64 from seed 0, made odd."""
    z = (number + 1) * _GOLDEN % _MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _MODULUS
    return z ^ (z >> 31) | 1


def column_weight(column: int) -> int:
    return weight(column)


def row_weight(row: int) -> int:
    return weight(NUM_COLUMNS + row)


def label(quantity: str, tensor: str) -> str:
    """`the gradient of layers.0.attention.wq.weight`, for people."""
    quantity = quantity.removeprefix(BEFORE)
    return _LABELS.get(quantity, f"the {quantity} of {{}}").format(tensor)


def describe_flip(found: Sequence[Sequence[int]]) -> str:
    """What `flipped` found, for people: `bit 9 of value 77,777`."""
    if not found:
        return "more than one bit"
    values = " or ".join(f"{element:,}" for element, _ in found)
    return f"bit {found[0][1]} of value {values}"


def flipped(before: int, after: int, num_values: int, num_bits: int) -> list[tuple[int, int]]:
    """(element, bit) of the one flipped bit between two fingerprints of a tensor of `num_values`
    values of `num_bits`. Several where the sums leave a choice: above 10^8 values, for the highest
    bits; none where more than one value differs, or more than one bit."""
    difference = (after - before) % _MODULUS
    bit = (difference & -difference).bit_length() - 1
    if not 0 <= bit < num_bits:
        return []
    return sorted((element, bit) for element in _weighing(difference, bit, num_values))


def _weighing(difference: int, bit: int, num_values: int) -> Iterator[int]:
    """Elements whose weight times 2^bit is the difference, or its negative."""
    modulus = _MODULUS >> bit
    columns = {column_weight(c) % modulus: c for c in range(NUM_COLUMNS)}
    odd = difference >> bit
    for row in range(-(-num_values // NUM_COLUMNS)):
        ratio = odd * _inverse_of_row(row) % modulus
        for of_column in (ratio, modulus - ratio):
            element = row * NUM_COLUMNS + columns.get(of_column, NUM_COLUMNS)
            if of_column in columns and element < num_values:
                yield element


def _inverse_of_row(row: int) -> int:
    return pow(row_weight(row), -1, _MODULUS)
