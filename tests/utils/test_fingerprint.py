"""The formula by itself: what the difference of two sums tells."""

import random

import pytest

from model_check.utils.fingerprint import (
    NUM_COLUMNS,
    QUANTITIES,
    column_weight,
    flipped,
    in_order,
    label,
    row_weight,
    weight,
)

MODULUS = 1 << 64


def weight_of(element: int) -> int:
    row, column = divmod(element, NUM_COLUMNS)
    return row_weight(row) * column_weight(column) % MODULUS


def test_state_of_other_optimizers_is_compared_causes_before_effects() -> None:
    assert in_order(["loss", "weights", "rng.torch"]) == QUANTITIES
    told = ("momentum_buffer", "rng.cuda", "before.momentum_buffer", "weights", "before.ax")
    order = in_order(told)
    assert [q for q in order if q not in QUANTITIES] == [
        "before.ax", "before.momentum_buffer", "momentum_buffer"
    ]  # fmt: skip
    assert [q for q in order if q in QUANTITIES] == list(QUANTITIES)
    before, after = order.index("before.momentum_buffer"), order.index("momentum_buffer")
    assert order.index("before.exp_avg_sq") < before < order.index("forward")
    assert order.index("exp_avg_sq") < after < order.index("weights")
    assert label("before.momentum_buffer", "h.w") == "the momentum_buffer of h.w"
    assert label("inputs", "0") == "input 0 of the model"


def test_the_weights_are_those_of_splitmix64() -> None:
    """The first numbers from seed 0, as its authors' program prints them, made odd."""
    known = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [weight(n) for n in range(3)] == [number | 1 for number in known]


@pytest.mark.parametrize("num_bits", [16, 32])
def test_a_flipped_bit_is_named_with_its_element(num_bits: int) -> None:
    draw = random.Random(7)
    for _ in range(200):
        num_values = draw.choice([1, 1000, 1024, 100_000, 4_000_000])
        element, bit = draw.randrange(num_values), draw.randrange(num_bits)
        change = draw.choice([1, -1]) * weight_of(element) << bit
        before = draw.randrange(MODULUS)
        found = flipped(before, (before + change) % MODULUS, num_values, num_bits)
        assert found == [(element, bit)]


def test_two_flipped_bits_are_not_taken_for_one() -> None:
    draw = random.Random(8)
    for _ in range(100):
        one, other = draw.sample(range(100_000), 2)
        change = (weight_of(one) << draw.randrange(32)) + (weight_of(other) << draw.randrange(32))
        assert flipped(0, change % MODULUS, 100_000, 32) == []


def test_equal_sums_name_nothing() -> None:
    assert flipped(5, 5, 100, 32) == []
