"""Who differs, in what, and what the sums tell of it."""

import pytest
from msgspec.structs import replace

from launcher.verdict.agreement import Agreement
from launcher.verdict.disagreement import explain
from model_check.events import Evaluation, Step, Vectors
from model_check.utils.fingerprint import column_weight, row_weight

SAME = (0.5).hex()
MODULUS = 1 << 64


def step(number: int, t: int = 0, **fp: str) -> Step:
    names = {name.replace("before_", "before."): value for name, value in fp.items()}
    return Step(step=number, loss=SAME, grad_norm=SAME, lr=1.0, ms=1.0, tokens=8, t=t, fp=names)


def compared(*steps: Step):
    agreement = Agreement({f"GPU{n}": "H100" for n in range(len(steps))})
    return [agreement.record(f"GPU{n}", step) for n, step in enumerate(steps)][-1]


def test_every_kind_come_before_effects() -> None:
    good = step(4, before_weights="1", forward="1", gradients="1", weights="1")
    bad = step(4, before_weights="1", forward="2", gradients="3", weights="4")
    found = compared(good, bad, good)
    assert (found.quantity, found.odd) == ("forward", ("GPU1",))
    assert str(found) == (
        "step 4: GPU1 differs in the outputs of its blocks: GPU0 and GPU2 1, GPU1 2"
    )


def test_everyone_who_differs_anywhere_is_marked() -> None:
    good, late = step(4, forward="1", weights="1"), step(4, forward="1", weights="7")
    bad = step(4, forward="2", weights="2")
    assert compared(good, bad, good, late, good).odd == ("GPU1", "GPU3")


def test_the_votes_of_the_odd_do_not_count_any_more() -> None:
    """In the weights alone, no value has the majority of four."""
    good, late = step(4, forward="1", weights="1"), step(4, forward="1", weights="7")
    bad = step(4, forward="2", weights="2")
    assert compared(good, bad, good, late).odd == ("GPU1", "GPU3")


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ("ab", ()),
        ("aab", ("GPU2",)),
        ("aabb", ()),
        ("aaaaaaab", ("GPU7",)),
        ("aabc", ()),
        ("baa", ("GPU0",)),
        ("aabba", ("GPU2", "GPU3")),
        ("aabbb", ("GPU0", "GPU1")),
    ],
)
def test_a_strict_majority_names_the_others(values: str, odd: tuple[str, ...]) -> None:
    found = compared(*(step(1, weights=value) for value in values))
    assert found is not None
    assert found.odd == odd


def test_a_quantity_that_one_does_not_tell_is_not_compared() -> None:
    assert compared(step(1, weights="1"), step(1)) is None


def test_validation_losses_are_compared_before_the_step_of_their_number() -> None:
    agreement = Agreement({"GPU0": "", "GPU1": ""})
    for name, loss in (("GPU0", SAME), ("GPU1", (1.0).hex())):
        found = agreement.record(name, Evaluation(step=3, split="own", loss=loss, tokens=5))
    assert found is not None
    assert "step 3: workers differ in the validation loss of own, and no majority" in str(found)


def test_workers_on_other_devices_are_no_equals() -> None:
    agreement = Agreement({"GPU0": "H100", "GPU1": "H100", "GPU2": "H100"})
    for name, num_sms in (("GPU0", 132), ("GPU1", 114), ("GPU2", 132)):
        assert agreement.identify(name, {"num_sms": num_sms, "torch": "2.13"}) is None
    assert agreement.equals("GPU0") == ["GPU0", "GPU2"]
    assert agreement.record("GPU1", step(0, weights="2")) is None
    assert agreement.record("GPU0", step(0, weights="1")) is None
    assert agreement.record("GPU2", step(0, weights="1")) is None
    assert agreement.agreed_steps == {"GPU0": 1, "GPU2": 1}


def test_nobody_is_alone_before_all_have_said_what_they_are() -> None:
    agreement = Agreement({"GPU0": "H100", "GPU1": "H100"})
    agreement.identify("GPU0", {"num_sms": 132})
    assert agreement.record("GPU0", step(0, weights="1")) is None
    agreement.identify("GPU1", {"num_sms": 132})
    assert agreement.record("GPU1", step(0, weights="2")) is not None


def test_equals_with_another_stack_cannot_be_compared() -> None:
    agreement = Agreement({"GPU0": "H100", "GPU1": "H100"})
    assert agreement.identify("GPU0", {"torch": "2.13", "settings": "ab"}) is None
    found = agreement.identify("GPU1", {"torch": "2.12", "settings": "ab"})
    assert str(found) == "not comparable: the workers differ in torch: GPU0 2.13, GPU1 2.12"


def vectors(*, w1: int, w2: int) -> Vectors:
    weights = {"w1": f"{w1 % MODULUS:016x}", "w2": f"{w2 % MODULUS:016x}"}
    sizes = {"w1": (5000, 32), "w2": (5000, 32)}
    return Vectors(step=4, fp={"weights": weights}, sizes=sizes)


def test_the_vectors_name_tensor_value_and_bit() -> None:
    bad, good = step(4, weights="2"), step(4, weights="1")
    change = row_weight(3) * column_weight(7) << 11
    sent = {name: vectors(w1=5, w2=6) for name in ("GPU0", "GPU2")}
    found = explain(compared(good, bad, good), sent | {"GPU1": vectors(w1=5, w2=6 - change)})
    assert str(found) == (
        "step 4: GPU1 differs in w2 (bit 11 of value 3,079): GPU0 and GPU2 1, GPU1 2"
    )


def test_a_difference_in_several_values_of_several_tensors_says_so() -> None:
    good, bad = step(4, weights="1"), step(4, weights="2")
    sent = {name: vectors(w1=5, w2=6) for name in ("GPU0", "GPU2")}
    found = explain(compared(good, bad, good), sent | {"GPU1": vectors(w1=12345, w2=7)})
    assert "in w1 (more than one bit) and 1 more: " in str(found)


def test_of_two_tensor_value_and_bit_are_named_and_nobody() -> None:
    change = row_weight(0) * column_weight(9) << 30
    sent = {"GPU0": vectors(w1=5, w2=6), "GPU1": vectors(w1=5, w2=6 + change)}
    found = explain(compared(step(4, weights="1"), step(4, weights="2")), sent)
    assert found.odd == ()
    where = "w2 (bit 30 of value 9), and no majority tells which is right: "
    assert f"workers differ in {where}" in str(found)


def test_without_an_answer_the_quantity_is_all() -> None:
    found = compared(step(4, weights="1"), step(4, weights="2"), step(4, weights="1"))
    assert explain(found, {}) == found
    assert explain(found, {"GPU0": vectors(w1=1, w2=2), "GPU1": Vectors(step=4)}) == found


def test_roll_ups_of_other_tensors_are_not_compared() -> None:
    """A worker that resumed elsewhere takes all in its first step, the others a slot."""
    one = replace(step(4, weights="1", grad_norms="5"), taken="0, 1 of 6")
    other = replace(step(4, weights="2", grad_norms="5"), taken="all, all of 6")
    assert compared(one, other, one) is None
    other = replace(step(4, weights="2", grad_norms="6"), taken="all, all of 6")
    found = compared(one, other, one)
    assert found is not None
    assert (found.quantity, found.odd) == ("grad_norms", ("GPU1",))


def test_tensors_that_one_worker_did_not_tell_name_nothing() -> None:
    found = compared(step(4, weights="1"), step(4, weights="2"))
    less = Vectors(step=4, fp={"weights": {"w2": f"{6:016x}"}}, sizes={"w2": (5000, 32)})
    explained = explain(found, {"GPU0": vectors(w1=5, w2=6), "GPU1": less})
    assert explained.tensor is None


def test_a_worker_that_has_ended_is_waited_for_by_nobody() -> None:
    agreement = Agreement({f"GPU{n}": "H100" for n in range(3)})
    for number in range(3):
        for name in ("GPU0", "GPU1"):
            assert agreement.record(name, step(number, weights="1")) is None
    assert agreement.leave("GPU2") is None
    assert agreement.agreed_steps == {"GPU0": 3, "GPU1": 3, "GPU2": 0}
    assert not agreement._waiting
    agreement.record("GPU0", step(3, weights="1"))
    assert agreement.record("GPU1", step(3, weights="2")) is not None


def test_what_waited_for_a_worker_that_has_ended_is_compared_then() -> None:
    agreement = Agreement({f"GPU{n}": "H100" for n in range(3)})
    agreement.record("GPU0", step(0, weights="1"))
    agreement.record("GPU1", step(0, weights="2"))
    found = agreement.leave("GPU2")
    assert found is not None
    assert found.step == 0
