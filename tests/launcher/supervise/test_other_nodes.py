"""What ranks on other nodes change in the judgement of ours."""

import pytest

from launcher.supervise.policy import (
    FOLLOW_S,
    Confession,
    Continue,
    Done,
    Limits,
    Stop,
    WorkerView,
    decide,
    follow_elsewhere,
)
from launcher.verdict.nodes import Elsewhere, LostPeer

LIMITS = Limits(grace_s=10, silence_s=300, is_job=True, num_distant=1, elsewhere_s=100)
NOW = 50.0


def running(name: str) -> WorkerView:
    return WorkerView(name, started_at=1.0, last_heard=NOW)


def follower(name: str, at: float = NOW) -> WorkerView:
    lost = Confession(at, 1, at, True, peer_lost=True)
    view = WorkerView(name, 1, started_at=1.0, last_heard=at, confession=lost)
    view.error = "another rank did not come in 3 s"
    return view


def lost_elsewhere(at: float = NOW) -> LostPeer:
    return LostPeer("CPU0 on n2", "another rank did not come in 3 s", at)


def test_a_rank_that_others_wait_for_elsewhere_is_the_one_that_did_not_come() -> None:
    workers = [running("CPU0")]
    assert decide(workers, NOW, LIMITS, (), [lost_elsewhere()]) == Continue(until=NOW + FOLLOW_S)
    stop = decide(workers, NOW + FOLLOW_S, LIMITS, (), [lost_elsewhere()])
    assert isinstance(stop, Stop)
    assert stop.culprits == ("CPU0",)
    assert "CPU0 did not come where the others waited (CPU0 on n2: another rank" in str(stop.reason)


def test_other_nodes_get_time_to_tell_whom_ours_lost() -> None:
    workers = [follower("CPU0")]
    assert decide(workers, NOW + FOLLOW_S, LIMITS) == Continue(until=NOW + LIMITS.elsewhere_s)
    stop = decide(workers, NOW + LIMITS.elsewhere_s, LIMITS)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.exit_code) == ((), 1)


def test_where_every_rank_of_every_node_lost_another_one_nobody_waits() -> None:
    """The link between GPUs of two nodes is broken, and that between launchers is not."""
    stop = decide([follower("CPU0")], NOW + FOLLOW_S, LIMITS, (), [lost_elsewhere()])
    assert isinstance(stop, Stop)
    assert str(stop.reason).startswith("every rank lost another one, and none tells why")


def test_of_ranks_here_the_one_that_was_first_to_fail_speaks_not_the_first_heard() -> None:
    early, late = follower("CPU0"), follower("CPU1")
    early.confession = Confession(NOW - 2, 1, NOW + 1, True, peer_lost=True)
    late.confession = Confession(NOW - 1, 1, NOW, True, peer_lost=True)
    alone = Limits(grace_s=10, silence_s=300, is_job=True)
    stop = decide([late, early], NOW + FOLLOW_S, alone)
    assert isinstance(stop, Stop)
    assert str(stop.reason).endswith("tells why (CPU0: another rank did not come in 3 s)")


def test_ranks_that_are_done_are_missed_by_nobody() -> None:
    done = WorkerView("CPU0", 0, started_at=1.0, last_heard=NOW)
    assert decide([done], NOW + FOLLOW_S, LIMITS, (), [lost_elsewhere()]) == Done()


def test_our_own_failure_counts_more_than_those_that_follow_it_elsewhere() -> None:
    failed = WorkerView("CPU0", 7, started_at=1.0, last_heard=NOW, ended_at=NOW)
    stop = decide([failed], NOW, LIMITS, (), [lost_elsewhere()])
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.exit_code) == (("CPU0",), 7)


def elsewhere(exit_code: int = 20, worker: str | None = "CPU0") -> Stop:
    where = Elsewhere(node="n2", worker=worker, step=3, cause="a NaN", exit_code=exit_code)
    return Stop(where.told, exit_code, elsewhere=where)


def test_a_failure_elsewhere_waits_a_moment_for_ours_to_fail_alike() -> None:
    ours = [running("CPU0"), follower("CPU1")]
    follow = follow_elsewhere(elsewhere(), NOW, ours, NOW, LIMITS)
    assert follow == Continue(until=NOW + FOLLOW_S)
    assert follow_elsewhere(elsewhere(), NOW, ours, NOW + FOLLOW_S, LIMITS) == elsewhere()


def test_it_waits_for_nobody_that_has_lost_a_rank_or_passed_that_step() -> None:
    passed = running("CPU1")
    passed.last_step = 3
    ours = [follower("CPU0"), passed]
    assert follow_elsewhere(elsewhere(), NOW, ours, NOW, LIMITS) == elsewhere()


@pytest.mark.parametrize("stop", [elsewhere(137), elsewhere(124), elsewhere(143, None)])
def test_a_death_a_hang_and_a_request_elsewhere_end_ours_at_once(stop: Stop) -> None:
    assert follow_elsewhere(stop, NOW, [running("CPU0")], NOW, LIMITS) == stop
