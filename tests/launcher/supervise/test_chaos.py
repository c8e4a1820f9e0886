"""Random trees of misbehaving workers under random signals: no promise of the supervisor breaks.

A short pass by default; `CHAOS_ROUNDS=1000 CHAOS_SEED=7` make it longer and repeatable.
"""

import os
from pathlib import Path

import pytest

from tests.launcher.supervise.chaos.plan import draw
from tests.launcher.supervise.chaos.storm import storm

SEED = int(os.environ.get("CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "30"))


@pytest.mark.timeout(120 + 10 * ROUNDS)
def test_no_storm_of_faults_breaks_a_promise(tmp_path: Path) -> None:
    broken = [told for _, told in storm(tmp_path, SEED, range(ROUNDS)) if told]
    assert not broken, "\n".join(broken)


def test_a_seed_draws_the_same_round_again() -> None:
    assert draw("7/3") == draw("7/3") != draw("7/4")
