"""The bits of several nodes."""

from launcher.nodes.comparison import Comparison
from launcher.nodes.messages import Bits, Failure, Hello


def hellos(*kinds: str | None) -> dict[int, Hello]:
    return {
        node: Hello(node, "1.0", f"n{node + 1}", "host", ["GPU0"], kind, "2.13", {})
        for node, kind in enumerate(kinds)
    }


def told(step: int, *bits: str, kinds: tuple[str | None, ...]) -> tuple[Comparison, list[Failure]]:
    comparison = Comparison()
    taken = [
        comparison.take(Bits(node, step, {"loss": "1", "weights": each}), hellos(*kinds))
        for node, each in enumerate(bits)
    ]
    return comparison, [failure for failure in taken if failure is not None]


def test_nodes_that_agree_are_counted_once_all_have_told_it() -> None:
    comparison, found = told(0, "a", "a", kinds=("h100", "h100"))
    assert not found
    assert comparison.num_agreed == 1


def test_the_odd_one_of_three_is_named_with_its_only_worker() -> None:
    _, (found,) = told(4, "a", "b", "a", kinds=("h100",) * 3)
    assert (found.node, found.worker, found.step, found.exit_code) == (1, "GPU0", 4, 21)
    assert found.cause == "other weights than 2 other nodes at step 4"


def test_of_two_that_differ_none_is_named() -> None:
    _, (found,) = told(4, "a", "b", kinds=("h100",) * 2)
    assert (found.worker, found.exit_code) == (None, 23)
    assert found.cause == (
        "n1 and n2 differ in their weights at step 4, and none is in the majority"
    )


def test_nodes_of_different_kinds_may_round_differently() -> None:
    comparison, found = told(4, "a", "b", kinds=("h100", "a100"))
    assert (found, comparison.num_agreed) == ([], 0)
    assert not told(4, "a", "b", kinds=(None, None))[1]
