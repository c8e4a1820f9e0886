"""The policy, as histories."""

import pytest

from launcher.policy import (
    LINGER_S,
    Confession,
    Continue,
    Done,
    Limits,
    Stop,
    WorkerView,
    decide,
    ended_early,
    stop_for_signal,
)

NO_LIMIT = Limits(grace_s=10, silence_s=0)
HALF_A_MINUTE = Limits(grace_s=10, silence_s=30)


def running(name: str, last_heard: float = 0.0, **more: object) -> WorkerView:
    return WorkerView(name, started_at=0.0, last_heard=last_heard, **more)  # type: ignore[arg-type]


def ended(name: str, returncode: int, at: float, wake: int, **more: object) -> WorkerView:
    return running(name, returncode=returncode, ended_at=at, wake=wake, **more)


def test_a_run_goes_on_while_somebody_works() -> None:
    views = [ended("GPU0", 0, at=5, wake=3), running("GPU1")]
    assert decide(views, 60.0, NO_LIMIT) == Continue()


def test_a_run_is_done_when_everybody_ended_well() -> None:
    views = [ended("GPU0", 0, at=5, wake=3), ended("GPU1", 0, at=6, wake=4)]
    assert decide(views, 60.0, NO_LIMIT) == Done()


def test_a_worker_that_is_not_started_yet_keeps_a_run_from_being_done() -> None:
    assert decide([ended("GPU0", 0, 5, 3), WorkerView("GPU1")], 60.0, NO_LIMIT) == Continue()


def test_the_first_of_two_deaths_is_the_culprit_and_keeps_its_exit_code() -> None:
    views = [ended("GPU0", 1, at=41.3, wake=9), ended("GPU1", 7, at=41.2, wake=8)]
    expected = Stop("GPU1 failed first: exit code 7 after 41.2 s", 7, ("GPU1",))
    assert decide(views, 60.0, NO_LIMIT) == expected


def test_a_signal_becomes_128_plus_its_number() -> None:
    stop = decide([ended("GPU0", -9, at=41.2, wake=1)], 60.0, NO_LIMIT)
    assert stop == Stop("GPU0 failed first: killed by SIGKILL (9) after 41.2 s", 137, ("GPU0",))


def test_two_deaths_in_one_wake_up_are_a_tie() -> None:
    views = [ended("GPU0", 7, at=4, wake=2), running("GPU1"), ended("GPU2", -9, at=4, wake=2)]
    stop = decide(views, 5.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0", "GPU2")
    assert stop.exit_code == 7
    assert "GPU0 (exit code 7), GPU2 (killed by SIGKILL (9))" in stop.reason


def test_its_own_word_outweighs_the_order_of_deaths() -> None:
    said = Confession(at=3.9, exit_code=20, heard_at=3.9, final=True)
    views = [
        ended("GPU0", 1, at=4.0, wake=2),
        ended("GPU1", 20, at=4.5, wake=3, confession=said, error="loss is NaN at step 3\nmore"),
    ]
    stop = decide(views, 5.0, NO_LIMIT)
    assert stop == Stop(
        "GPU1 failed first: exit code 20 after 4.5 s: loss is NaN at step 3", 20, ("GPU1",)
    )


def test_its_own_word_outweighs_a_tie() -> None:
    said = Confession(at=3.9, exit_code=7, heard_at=3.9, final=True)
    views = [ended("GPU0", 1, 4.0, 2), ended("GPU1", 7, 4.0, 2, confession=said)]
    stop = decide(views, 5.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU1",)


def test_a_worker_still_writing_evidence_of_its_nan_is_the_culprit_of_a_later_death() -> None:
    said = Confession(at=2.0, exit_code=20, heard_at=2.0, final=False)
    views = [running("GPU0", confession=said), ended("GPU1", 1, at=4.0, wake=2)]
    stop = decide(views, 5.0, NO_LIMIT)
    assert stop == Stop("GPU0 failed first: it announced exit code 20 after 2.0 s", 20, ("GPU0",))


def test_a_death_before_somebody_elses_nan_is_the_cause() -> None:
    said = Confession(at=4.5, exit_code=20, heard_at=4.5, final=False)
    views = [running("GPU0", confession=said), ended("GPU1", 1, at=4.0, wake=2)]
    stop = decide(views, 5.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU1",)


def test_a_nan_alone_stops_nobody() -> None:
    said = Confession(at=2.0, exit_code=20, heard_at=2.0, final=False)
    assert decide([running("GPU0", confession=said)], 1e6, NO_LIMIT) == Continue()


def test_a_worker_that_ended_well_after_a_nan_is_no_culprit() -> None:
    said = Confession(at=2.0, exit_code=20, heard_at=2.0, final=False)
    views = [ended("GPU0", 0, 3.0, 1, confession=said), ended("GPU1", 1, 4.0, 2)]
    stop = decide(views, 5.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU1",)


def test_a_worker_that_said_it_failed_gets_time_to_end_and_no_more() -> None:
    views = [
        running("GPU0", confession=Confession(at=10.0, exit_code=7, heard_at=10.0, final=True))
    ]
    assert decide(views, 11.0, NO_LIMIT) == Continue(until=10.0 + LINGER_S)
    stop = decide(views, 10.0 + LINGER_S, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.exit_code, stop.culprits) == (7, ("GPU0",))


def test_a_silent_worker_stops_the_run() -> None:
    views = [running("GPU0", last_heard=58.0), running("GPU1", last_heard=3.0)]
    expected = Stop("GPU1 silent for 57 s (limit 30 s)", 124, ("GPU1",), is_hang=True)
    assert decide(views, 60.0, HALF_A_MINUTE) == expected


@pytest.mark.parametrize("phase", ["import", "compile", "save", "eval"])
def test_a_worker_in_a_long_phase_may_be_silent_ten_times_as_long(phase: str) -> None:
    views = [running("GPU0", last_heard=0.0, patient_phase=phase)]
    assert decide(views, 60.0, HALF_A_MINUTE) == Continue(until=300.0)
    stop = decide(views, 300.0, HALF_A_MINUTE)
    reason = f"GPU0 silent for 300 s in phase {phase} (limit 300 s)"
    assert stop == Stop(reason, 124, ("GPU0",), is_hang=True)


def test_who_ended_well_long_before_the_others_is_told_once_it_is_long() -> None:
    views = [ended("GPU0", 0, at=5, wake=3), running("GPU1"), ended("GPU2", 0, at=9, wake=4)]
    limits = Limits(grace_s=10, silence_s=0, early_s=30)
    assert decide(views, 34.0, limits) == Continue(until=35.0)
    assert ended_early(views, 34.0, limits) == []
    assert decide(views, 35.0, limits) == Continue(until=39.0)
    assert ended_early(views, 35.0, limits) == [views[0]]
    assert ended_early([views[0], views[2]], 60.0, limits) == []


def test_what_the_cgroup_counted_is_part_of_the_cause() -> None:
    views = [ended("GPU0", -9, at=41.2, wake=1, oom="the cgroup counted an OOM kill (no limit)")]
    stop = decide(views, 60.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.reason == (
        "GPU0 failed first: killed by SIGKILL (9) after 41.2 s; the cgroup counted an OOM kill "
        "(no limit)"
    )


def test_ended_workers_may_be_silent_for_ever() -> None:
    views = [ended("GPU0", 0, at=1, wake=1), running("GPU1", last_heard=999.0)]
    assert decide(views, 1000.0, HALF_A_MINUTE) == Continue(until=1029.0)


def test_a_worker_that_could_not_start_says_why() -> None:
    views = [
        ended("GPU0", 127, 1.0, 1, error="ENOENT: foo: No such file", spawn_failed=True),
    ]
    expected = Stop("GPU0 could not start: ENOENT: foo: No such file", 127, ("GPU0",))
    assert decide(views, 1.0, NO_LIMIT) == expected


def test_a_signal_to_us_is_nobodys_fault() -> None:
    assert stop_for_signal(15) == Stop("SIGTERM received", 143, ())
