"""Bits of identical runs are compared step by step, inside groups of like GPUs."""

import msgspec
import pytest

from launcher.verdict.agreement import NEVER, PATIENCE_S, Agreement
from launcher.verdict.disagreement import Disagreement
from model_check.events import Step

SAME, OTHER = (0.5).hex(), (0.5000001).hex()


def step(number: int, loss: str = SAME, grad_norm: str = SAME) -> Step:
    return Step(step=number, loss=loss, grad_norm=grad_norm, lr=1e-5, ms=1.0, tokens=8)


def at_time(event: Step, t: int) -> Step:
    return msgspec.structs.replace(event, t=t)


def alike(*names: str) -> Agreement:
    return Agreement(dict.fromkeys(names, "H100"))


def test_equal_bits_agree_and_are_counted() -> None:
    agreement = alike("GPU0", "GPU1")
    for number in range(3):
        assert agreement.record("GPU0", step(number)) is None
        assert agreement.record("GPU1", step(number)) is None
    assert agreement.agreed_steps == {"GPU0": 3, "GPU1": 3}


def test_a_worker_that_alone_has_a_loss_or_none_differs() -> None:
    for odd, usual in ((SAME, None), (None, SAME)):
        agreement = alike("GPU0", "GPU1", "GPU2")
        for name in ("GPU0", "GPU2"):
            agreement.record(name, msgspec.structs.replace(step(3), loss=usual))
        found = agreement.record("GPU1", msgspec.structs.replace(step(3), loss=odd))
        assert found is not None
        assert (found.quantity, found.odd) == ("loss", ("GPU1",))
        assert "none" in found.values
    agreement = alike("GPU0", "GPU1")
    for name in ("GPU0", "GPU1"):
        assert agreement.record(name, msgspec.structs.replace(step(3), loss=None)) is None


def test_the_odd_worker_of_three_is_named_with_the_step_and_the_quantity() -> None:
    agreement = alike("GPU0", "GPU1", "GPU2")
    agreement.record("GPU0", step(7))
    agreement.record("GPU1", step(7, grad_norm=OTHER))
    found = agreement.record("GPU2", step(7))
    assert found is not None
    assert (found.step, found.quantity, found.odd) == (7, "grad_norm", ("GPU1",))
    assert "step 7: GPU1 differs in the gradient norm" in str(found)


def test_two_workers_that_differ_have_no_majority() -> None:
    agreement = alike("GPU0", "GPU1")
    agreement.record("GPU0", step(2))
    found = agreement.record("GPU1", step(2, loss=OTHER))
    assert found is not None
    assert found.odd == ()
    assert "no majority" in str(found)


def test_a_tie_of_two_and_two_blames_nobody() -> None:
    found = Disagreement(1, "loss", {"a": SAME, "b": SAME, "c": OTHER, "d": OTHER})
    assert found.odd == ()


def test_two_odd_workers_of_five_are_both_named() -> None:
    bits = {"a": SAME, "b": OTHER, "c": SAME, "d": (0.1).hex(), "e": SAME}
    assert Disagreement(1, "loss", bits).odd == ("b", "d")


def test_a_last_bit_is_enough_to_differ() -> None:
    a, b = "0x1.0000000000000p+0", "0x1.0000000000001p+0"
    agreement = alike("GPU0", "GPU1")
    agreement.record("GPU0", step(0, loss=a))
    assert agreement.record("GPU1", step(0, loss=b)) is not None


def test_gpus_of_different_models_are_not_compared_with_each_other() -> None:
    agreement = Agreement({"GPU0": "A100", "GPU1": "H100"})
    assert agreement.record("GPU0", step(0)) is None
    assert agreement.record("GPU1", step(0, loss=OTHER)) is None


def test_a_worker_that_is_steps_ahead_is_compared_when_the_others_arrive() -> None:
    agreement = alike("GPU0", "GPU1")
    for number in range(5):
        assert agreement.record("GPU0", step(number)) is None
    assert agreement.record("GPU1", step(0)) is None
    found = agreement.record("GPU1", step(1, loss=OTHER))
    assert found is not None
    assert found.step == 1


def test_a_worker_that_stopped_reporting_does_not_hide_the_difference_of_the_others() -> None:
    agreement = alike("GPU0", "GPU1", "GPU2")
    agreement.record("GPU0", at_time(step(0), 10**9))
    assert agreement.due == NEVER
    agreement.record("GPU1", at_time(step(0, loss=OTHER), 2 * 10**9))
    agreement.record("GPU0", at_time(step(1), 3 * 10**9))
    assert agreement.due == 2 + PATIENCE_S
    assert agreement.overdue(1.9 + PATIENCE_S) is None
    overdue = agreement.overdue(2 + PATIENCE_S)
    assert overdue is not None
    assert (overdue.step, overdue.odd, set(overdue.bits)) == (0, (), {"GPU0", "GPU1"})


def test_at_the_end_of_a_run_a_difference_that_nobody_settled_counts() -> None:
    agreement = alike("GPU0", "GPU1", "GPU2")
    agreement.record("GPU0", step(3))
    assert agreement.unsettled() is None
    assert agreement.record("GPU1", step(3, loss=OTHER)) is None
    found = agreement.unsettled()
    assert found is not None
    assert found.step == 3


def printed(number: int, **fp: str) -> Step:
    return msgspec.structs.replace(step(number), fp=fp, taken="1 of 1")


@pytest.mark.parametrize("left_out", [{"gradients", "weights"}, {"gradients"}, {"weights"}])
def test_a_worker_that_leaves_a_quantity_out_hides_no_difference_of_the_others(
    left_out: set[str],
) -> None:
    whole = {"gradients": "aa", "weights": "bb"}
    part = {name: bits for name, bits in whole.items() if name not in left_out}
    agreement = alike("GPU0", "GPU1", "GPU2", "GPU3", "GPU4")
    for number in range(4):
        for name in ("GPU0", "GPU2", "GPU3", "GPU4"):
            assert agreement.record(name, printed(number, **whole)) is None
        assert agreement.record("GPU1", printed(number, **part)) is None
    for name in ("GPU1", "GPU2", "GPU3"):
        agreement.record(name, printed(4, **(part if name == "GPU1" else whole)))
    odd = dict.fromkeys(whole, "cc")
    agreement.record("GPU0", printed(4, **odd))
    found = agreement.record("GPU4", printed(4, **whole))
    assert found is not None
    assert (found.step, found.quantity, found.odd) == (4, "gradients", ("GPU0",))
    assert {name: set(lacks) for name, lacks in agreement.lacking.items()} == {"GPU1": left_out}


def test_two_that_leave_out_the_same_are_compared_in_the_rest() -> None:
    agreement = alike("GPU0", "GPU1", "GPU2")
    agreement.record("GPU0", printed(1, gradients="aa"))
    agreement.record("GPU1", printed(1))
    assert agreement.record("GPU2", printed(1)) is None
    assert set(agreement.lacking) == {"GPU1", "GPU2"}
    agreement.record("GPU0", printed(2, gradients="aa"))
    agreement.record("GPU1", msgspec.structs.replace(printed(2), loss=OTHER))
    found = agreement.record("GPU2", printed(2))
    assert found is not None
    assert found.odd == ("GPU1",)
