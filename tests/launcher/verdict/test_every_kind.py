"""Every kind of finding is produced by a test; here are those of which no test tells more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.verdict.disagreement import Disagreement, Replay
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.record import RunEnd
from launcher.verdict.results import RunResult
from launcher.verdict.severity import Repeat
from model_check.events import Done, Phase
from model_check.utils.trials import PASSED, TRIAL_OF
from tests.deadline import DEADLINE_S
from tests.launcher.verdict.test_judge import BROKEN, ended, judged, told, trained

HERE = Path(__file__).parent
NAMES = ("GPU0", "GPU1", "GPU2")


def test_every_kind_is_produced_by_a_test(tmp_path: Path) -> None:
    """Of a few files, which take a second: a kind without a test there is a line of `unseen`."""
    unseen = tmp_path / "unseen"
    files = [
        str(HERE / f"test_{name}.py")
        for name in ("every_kind", "golden", "judge", "own_command", "symptoms")
    ]
    program = [sys.executable, "-m", "pytest", "-q", "-p", "tests.launcher.verdict.seen_kinds"]
    done = subprocess.run(
        [*program, "-p", "no:cacheprovider", *files, "-k", "not every_kind_is"],
        cwd=HERE.parents[2],
        env={**os.environ, "UNSEEN_KINDS": str(unseen)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert unseen.read_text() == ""


def named(
    end: RunEnd, all_facts: dict[str, WorkerFacts], replay: Replay | None = None
) -> tuple[str, str]:
    """(verdict, cause) of GPU1, of workers that we stopped."""
    workers = [ended(name, 143, stopped_by_us=True) for name in all_facts]
    end = end if replay is None else replace(end, replays=(replay,))
    return of_gpu1(judged(end, workers, all_facts))


def of_gpu1(result: RunResult) -> tuple[str, str]:
    row = next(row for row in result.workers if row.name == "GPU1")
    return row.verdict.value, row.cause or ""


AGAIN = {
    Repeat.NOT_REPLAYED: ("SUSPECT", ""),
    Repeat.TRANSIENT: ("SUSPECT", "right in 4 replays"),
    Repeat.UNSETTLED: ("SUSPECT", "wrong again in 2 of 4 replays"),
    Repeat.PERSISTENT: ("FAIL", "wrong again in 2 of 4 replays"),
}


@pytest.mark.parametrize("repeat", AGAIN)
@pytest.mark.parametrize("fault", ["odd", "broken", "trial"])
def test_what_its_replays_showed_of_one_that_is_named(fault: str, repeat: Repeat) -> None:
    trial = f"{TRIAL_OF}attention kernel flash"
    shown = {"GPU0": PASSED, "GPU1": "gave other bits", "GPU2": PASSED}
    difference = {
        "odd": Disagreement(2, "loss", {"GPU0": "a", "GPU1": "b", "GPU2": "a"}),
        "broken": None,
        "trial": Disagreement(0, trial, shown),
    }[fault]
    what = {
        "odd": "differs from the majority at step 2, loss",
        "broken": "the exp_avg of w changed",
        "trial": "its attention kernel flash gave other bits; 2 equals passed",
    }[fault]
    end = RunEnd(exit_code=21, reason="r", culprits=("GPU1",), disagreement=difference)
    replay = Replay(to_step=2, suspects=("GPU1",), times=4, wrong=2, repeats={"GPU1": repeat})
    broken = [BROKEN] if fault == "broken" else []
    all_facts = {"GPU0": told(), "GPU1": told(*broken), "GPU2": told()}
    verdict, cause = named(end, all_facts, None if repeat is Repeat.NOT_REPLAYED else replay)
    assert (verdict, cause.startswith(what)) == (AGAIN[repeat][0], True), cause
    assert cause.endswith(AGAIN[repeat][1])


def test_a_trial_that_one_of_two_failed_names_nobody() -> None:
    shown = {"GPU0": PASSED, "GPU1": "is not close"}
    differs = Disagreement(0, f"{TRIAL_OF}fused AdamW", shown)
    end = RunEnd(exit_code=23, reason="r", disagreement=differs)
    found = named(end, {name: told() for name in shown})
    assert found == ("INCONCLUSIVE", "its fused AdamW is not close; GPU0 passed")


def test_a_state_that_changed_alike_in_all_is_the_softwares() -> None:
    end = RunEnd(exit_code=21, reason="r", culprits=("GPU0",))
    verdict, cause = named(end, {name: told(BROKEN) for name in NAMES})
    assert (verdict, cause.endswith(", as in all workers")) == ("INVALID", True)


def test_a_rank_that_lost_another_only_followed_it() -> None:
    lost = told(Done(exit_code=1, error="rank 0 is gone", peer_lost=True))
    end = RunEnd(exit_code=7, reason="r", culprits=("GPU0",))
    found = judged(end, [ended("GPU0", 7), ended("GPU1", 1)], {"GPU0": told(), "GPU1": lost})
    assert of_gpu1(found) == ("STOPPED", "a rank without the others: rank 0 is gone")


def test_a_worker_whose_end_nobody_saw_is_inconclusive() -> None:
    workers = [ended("GPU0"), ended("GPU1", None)]
    found = judged(RunEnd(exit_code=0), workers, {name: trained() for name in ("GPU0", "GPU1")})
    assert of_gpu1(found) == ("INCONCLUSIVE", "its end was not seen")


def test_a_signal_to_us_stops_workers_and_blames_none() -> None:
    end = RunEnd(exit_code=143, reason="r", requests=(15,))
    found = judged(end, [ended("GPU1", 143, stopped_by_us=True)], {"GPU1": told()}, steps=9)
    assert of_gpu1(found) == ("STOPPED", "stopped by us")
    assert found.workers[0].cause_class == "user"


def test_a_deadline_that_came_too_soon_proves_nothing() -> None:
    end = RunEnd(exit_code=75, reason="r", is_deadline=True)
    workers = [ended(name, 143, stopped_by_us=True) for name in NAMES]
    started = {name: told(Phase(name="train")) for name in NAMES}
    found = judged(end, workers, started, dict.fromkeys(NAMES, 2), steps=90)
    assert of_gpu1(found) == ("INCONCLUSIVE", "2 steps compared, 10 are enough")
