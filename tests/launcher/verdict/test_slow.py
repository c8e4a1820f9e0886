"""Who is slower than its equals, from which step on; and what names nobody."""

from collections.abc import Callable, Mapping

import pytest

from launcher.verdict.slow import IN_A_ROW, MAX_USUAL, Slow, Slowness
from model_check.events import Step

Busy = Callable[[str, int], float | None]
ZERO = (0.0).hex()


def step(number: int, busy_ms: float | None) -> Step:
    t = (number + 1) * 10**9
    return Step(t=t, step=number, loss=ZERO, grad_norm=ZERO, lr=0, ms=1, tokens=8, busy_ms=busy_ms)


def judged(names: str, busy: Busy, num_steps: int = 60) -> dict[str, Slow]:
    """A group of the workers `names` (one letter each); `busy(worker, step)` in milliseconds."""
    slowness = Slowness(dict.fromkeys(names, "H100"))
    for number in range(num_steps):
        for name in names:
            slowness.record(name, step(number, busy(name, number)))
    return slowness.found


def slowed(who: str, steps: range, factor: float = 1.3) -> Busy:
    return lambda name, number: 100.0 * (factor if name in who and number in steps else 1.0)


def test_one_of_three_is_slow_from_its_first_slow_step_on() -> None:
    found = judged("abc", slowed("b", range(40, 60), 1.31))
    assert list(found) == ["b"]
    assert str(found["b"]) == "slow: 1.31 x its equals since step 40 (131 ms against 100 ms)"
    assert (found["b"].num_steps, found["b"].since_ns, found["b"].last_ns) == (20, 41e9, 60e9)


def test_a_stretch_that_ended_has_its_last_step() -> None:
    found = judged("abc", slowed("b", range(20, 35)))
    assert str(found["b"]).startswith("slow: 1.30 x its equals in steps 20 to 34 (")


def test_of_two_stretches_the_longer_is_told() -> None:
    def busy(name: str, number: int) -> float:
        return 200.0 if name == "b" and (10 <= number < 21 or 30 <= number < 50) else 100.0

    assert judged("abcd", busy)["b"].since_step == 30


@pytest.mark.parametrize(("num_slow", "expected"), [(IN_A_ROW - 1, []), (IN_A_ROW, ["a"])])
@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcdefgh"])
def test_ten_steps_in_a_row_are_slow_and_nine_are_not(
    names: str, num_slow: int, expected: list[str]
) -> None:
    assert list(judged(names, slowed("a", range(30, 30 + num_slow)))) == expected


def test_single_slow_steps_are_noise_however_many() -> None:
    assert judged("abc", lambda name, k: 300.0 if name == "b" and k % 10 else 100.0) == {}
    assert judged("a", lambda _, k: 300.0 if k % 10 else 100.0) == {}


def test_fifteen_percent_are_not_slow() -> None:
    assert judged("abc", slowed("b", range(60), 1.149)) == {}
    assert list(judged("abc", slowed("b", range(60), 1.151))) == ["b"]


def test_the_first_five_steps_tell_nothing() -> None:
    found = judged("abc", slowed("b", range(60)))
    assert found["b"].since_step == 5
    assert judged("abc", slowed("b", range(14))) == {}
    assert judged("abc", slowed("b", range(15)))["b"].num_steps == 10


def test_a_resumed_worker_warms_up_again() -> None:
    slowness = Slowness(dict.fromkeys("abc", ""))
    for number in range(100, 120):
        for name in "abc":
            slowness.record(name, step(number, 150.0 if name == "b" else 100.0))
    assert slowness.found["b"].since_step == 105


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcdefgh"])
def test_a_group_that_is_slow_as_a_whole_names_nobody(names: str) -> None:
    assert judged(names, slowed(names, range(30, 60), 3.0)) == {}


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_one_that_is_faster_makes_nobody_slow(names: str) -> None:
    assert judged(names, slowed("a", range(60), 0.5)) == {}


def test_a_third_of_a_group_can_be_slow() -> None:
    assert list(judged("abcdef", slowed("be", range(20, 60)))) == ["b", "e"]


@pytest.mark.parametrize("names", ["a", "ab"])
def test_one_or_two_are_compared_with_their_own_past(names: str) -> None:
    found = judged(names, slowed("a", range(40, 60), 1.4))
    assert list(found) == ["a"]
    expected = "slow: 1.40 x its own earlier steps since step 40 (140 ms against 100 ms)"
    assert str(found["a"]) == expected


def test_of_two_one_that_always_was_slower_is_not_slow() -> None:
    assert judged("ab", slowed("a", range(60), 2.0)) == {}


def test_a_past_of_fewer_than_ten_steps_tells_nothing() -> None:
    assert judged("a", slowed("a", range(9, 60))) == {}  # then slow is what is usual
    assert judged("a", slowed("a", range(15, 60)))["a"].since_step == 15


def test_a_slowness_that_lasts_never_becomes_usual() -> None:
    found = judged("a", slowed("a", range(40, 3 * MAX_USUAL)), 3 * MAX_USUAL)
    assert (found["a"].num_steps, found["a"].ratio) == (3 * MAX_USUAL - 40, 1.3)


def test_steps_without_a_time_neither_count_nor_break_a_stretch() -> None:
    def busy(name: str, number: int) -> float | None:
        if number % 3 == 0 and name == "a":
            return None
        return 130.0 if name == "b" and number >= 20 else 100.0

    found = judged("abc", busy)
    assert (found["b"].since_step, found["b"].num_steps) == (20, 27)
    assert judged("abc", lambda name, _: None if name == "a" else 100.0) == {}
    assert judged("abc", lambda _name, _number: None) == {}


def test_groups_are_compared_each_by_itself() -> None:
    groups: Mapping[str, str] = dict.fromkeys("abc", "H100") | dict.fromkeys("xyz", "L4")
    slowness = Slowness(groups)
    for number in range(60):
        for name in "abcxyz":
            ms = 500.0 if name in "xyz" else 100.0
            slowness.record(name, step(number, ms * (1.3 if name == "y" and number > 30 else 1)))
    assert list(slowness.found) == ["y"]


def test_the_order_in_which_workers_tell_does_not_matter() -> None:
    slowness, busy = Slowness(dict.fromkeys("abc", "")), slowed("b", range(40, 60))
    for number in range(66):
        for name, behind in (("a", 0), ("b", 2), ("c", 5)):
            if 0 <= number - behind < 60:
                slowness.record(name, step(number - behind, busy(name, number - behind)))
    assert slowness.found == judged("abc", busy)


def test_memory_stays_bounded_beside_a_worker_that_never_tells() -> None:
    slowness = Slowness(dict.fromkeys("abc", ""))
    for number in range(5000):
        for name in "ab":
            slowness.record(name, step(number, 100.0))
    assert len(slowness._open[""]) <= 64
