"""Who is alone with other bits, and when a fault is its device's."""

from math import comb

import pytest

from launcher.verdict.alone import (
    MAX_CHANCE,
    MAX_PASSES,
    NUM_CLEAN,
    Answer,
    Standing,
    Tally,
    who_is_alone,
)

EQUAL, NAMED, VARY, UNSETTLED = Standing


@pytest.mark.parametrize(
    ("passes", "standing", "workers"),
    [
        ("a:x b:x c:x", EQUAL, ""),
        ("a:xx b:xx", EQUAL, ""),
        ("a:x", EQUAL, ""),
        ("a:x b:x c:y", NAMED, "c"),
        ("a:x b:x c:x d:y e:z", NAMED, "de"),
        ("a:x b:y", UNSETTLED, ""),
        ("a:xx b:yy", UNSETTLED, ""),  # the same wrong bits each time
        ("a:x b:x c:y d:y", UNSETTLED, ""),
        ("a:xx b:xy", NAMED, "b"),  # of two, too
        ("a:xx b:yx", NAMED, "b"),
        ("a:xx b:yz", NAMED, "b"),
        ("a:xx b:xx c:xy", NAMED, "c"),
        ("a:xx b:xy c:yy d:xx", NAMED, "bc"),
        ("a:xy", VARY, "a"),  # nobody is beside it
        ("a:xy b:xy", VARY, "ab"),
        ("a:xy b:xz c:xx", VARY, "ab"),
    ],
)
def test_who_is_alone_of_all_that_compute_the_same(
    passes: str, standing: Standing, workers: str
) -> None:
    told = {each[0]: list(each[2:]) for each in passes.split()}
    assert who_is_alone(told) == Answer(standing, tuple(workers))


def tally(wrong: int, times: int, num_healthy: int) -> Tally:
    """None of the healthy ones was wrong; their record of the run is one pass each."""
    return Tally(wrong, times, num_healthy * (times + 1), num_healthy)


@pytest.mark.parametrize(("num_healthy", "needed"), [(1, 6), (2, 4), (3, 4), (4, 4), (7, 3)])
def test_wrong_each_time_convicts_at_one_in_a_thousand(num_healthy: int, needed: int) -> None:
    assert tally(needed, needed, num_healthy).convicts
    before = tally(needed - 1, needed - 1, num_healthy)
    assert not before.convicts
    assert before.is_open
    chance = 1 / comb(needed + num_healthy * (needed + 1), needed)
    assert tally(needed, needed, num_healthy).chance == chance <= MAX_CHANCE < before.chance


def test_it_is_weighed_how_often_not_that_once_was_right() -> None:
    """C(8, 7) / C(17, 7) = 8 / 19,448; a healthy one that told one pass less counts so."""
    assert tally(7, 8, 1).convicts
    assert not Tally(7, 8, right=5, num_healthy=1).convicts


@pytest.mark.parametrize("times", range(1, MAX_PASSES + 1))
def test_what_never_comes_again_is_over_after_three(times: int) -> None:
    assert tally(0, times, 2).is_open == (times < NUM_CLEAN)


def test_it_ends_where_nothing_could_convict_any_more() -> None:
    assert tally(1, 3, 2).is_open
    assert not tally(1, 10, 2).is_open
    assert not tally(5, MAX_PASSES, 2).is_open
    assert not tally(3, 3, 0).is_open  # nobody is beside it
