"""Which training of a comparison runs when and where, and after which signal none begins."""

import signal
from collections.abc import Sequence

import pytest

from launcher.compare.arms import Arm
from launcher.compare.compare import _request
from launcher.compare.comparison import plan_turns
from launcher.plan import cpu_places
from launcher.verdict.record import RunEnd


def turns(arms: str, seeds: Sequence[int], num_places: int, replicas: int = 1) -> list[list[str]]:
    """`a42@0`: arm, seed and first place of each training."""
    planned = plan_turns([Arm(name, ()) for name in arms], seeds, cpu_places(num_places), replicas)
    return [[f"{t.arm.name}{t.seed}@{t.places[0].index}" for t in turn] for turn in planned]


@pytest.mark.parametrize(
    ("arms", "seeds", "num_places", "expected"),
    [
        ("ab", [1], 2, [["a1@0", "b1@1"]]),
        ("ab", [1], 1, [["a1@0"], ["b1@0"]]),
        ("ab", [1, 2], 2, [["a1@0", "b1@1"], ["a2@1", "b2@0"]]),
        ("ab", [1, 2], 3, [["a1@0", "b1@1"], ["a2@1", "b2@2"]]),
        ("ab", [1, 2, 3], 4, [["a1@0", "b1@1", "a2@2", "b2@3"], ["a3@1", "b3@2"]]),
        ("abc", [1], 2, [["a1@0", "b1@1"], ["c1@0"]]),
        (
            "abcd",
            [1, 2],
            2,
            [["a1@0", "b1@1"], ["c1@0", "d1@1"], ["a2@1", "b2@0"], ["c2@1", "d2@0"]],
        ),
    ],
)
def test_arms_of_a_seed_run_at_once_and_change_places(
    arms: str, seeds: list[int], num_places: int, expected: list[list[str]]
) -> None:
    assert turns(arms, seeds, num_places) == expected


def test_replicas_are_neighbours() -> None:
    assert turns("ab", [1], 5, replicas=2) == [["a1@0", "b1@2"]]


@pytest.mark.parametrize(
    ("end", "is_last", "told"),
    [
        (RunEnd(exit_code=0, reason=None), False, None),
        (RunEnd(exit_code=143, reason="", requests=(signal.SIGTERM,)), True, signal.SIGTERM),
        (RunEnd(exit_code=143, reason="", requests=(signal.SIGTERM, signal.SIGUSR1)), True, 15),
        (RunEnd(exit_code=0, reason=None, requests=(signal.SIGTERM,)), True, None),
        (RunEnd(exit_code=0, reason=None, requests=(signal.SIGTERM,)), False, signal.SIGTERM),
        (RunEnd(exit_code=0, reason=None, requests=(signal.SIGUSR1,)), True, signal.SIGUSR1),
    ],
)
def test_a_signal_that_came_too_late_changes_nothing_of_the_last_turn(
    end: RunEnd, is_last: bool, told: int | None
) -> None:
    assert _request(end, is_last) == told
