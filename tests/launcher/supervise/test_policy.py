"""The policy, as histories."""

import signal

import pytest

from launcher.supervise.policy import (
    AGE_S,
    FOLLOW_S,
    HOLD_S,
    IDLE_S,
    LATE_MOMENT_S,
    LATE_S,
    LINGER_S,
    MOMENT_S,
    Confession,
    Continue,
    Done,
    Limits,
    WorkerView,
    decide,
    ended_early,
    stop_for_signal,
)
from launcher.verdict.observer import SETTLE_S, SETTLE_STEPS
from launcher.verdict.record import Stop
from model_check.config.ranks import SILENCE_PATIENCE
from model_check.errors import EXIT_HANG
from model_check.utils.evidence import EVIDENCE_BYTES_PER_S, EVIDENCE_S
from model_check.utils.requests import request_of
from model_check.utils.wire import BEAT_S

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
    stop = decide(views, 8.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.tied) == ((), ("GPU0", "GPU2"))
    assert stop.exit_code == 7
    told = "died within one reading, so none is named before the other: "
    assert stop.reason == f"{told}GPU0 (exit code 7), GPU2 (killed by SIGKILL (9))"


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
    assert decide(views, 5.0, NO_LIMIT) == Continue(until=2.0 + EVIDENCE_S)
    stop = decide(views, 2.0 + EVIDENCE_S, NO_LIMIT)  # it hangs, and its peer is gone
    assert isinstance(stop, Stop)
    assert (stop.exit_code, stop.culprits) == (20, ("GPU0",))
    views[0].returncode, views[0].ended_at = 20, 6.0
    stop = decide(views, 6.0, NO_LIMIT)
    assert stop == Stop("GPU0 failed first: exit code 20 after 6.0 s", 20, ("GPU0",))


@pytest.mark.parametrize("silence_s", [1, 300])
@pytest.mark.parametrize("phase", [None, "save"])
@pytest.mark.parametrize("num_bytes", [0, 23_000_000_000])
def test_a_worker_that_falls_silent_with_its_evidence_ends_as_what_it_confessed(
    num_bytes: int, phase: str | None, silence_s: float
) -> None:
    said = Confession(2.0, 20, heard_at=2.0, final=False, evidence_bytes=num_bytes)
    silent = running("GPU0", confession=said, patient_phase=phase)
    limits = Limits(grace_s=10, silence_s=silence_s)
    silent.step_s = 12.0  # it is computed again
    limit_s = EVIDENCE_S + num_bytes / EVIDENCE_BYTES_PER_S + SILENCE_PATIENCE * 12.0
    for peer in (running("GPU1", last_heard=9000.0), ended("GPU1", 1, at=4.0, wake=2)):
        assert decide([silent, peer], 5.0, limits) == Continue(until=2.0 + limit_s)
        stop = decide([silent, peer], 2.0 + limit_s, limits)
        assert isinstance(stop, Stop)
        assert (stop.exit_code, stop.culprits, stop.is_hang) == (20, ("GPU0",), False)
        assert "which is not whole" in str(stop.reason)


def test_who_met_its_nan_later_is_not_blamed_for_its_silence() -> None:
    limits = Limits(grace_s=10, silence_s=300)
    first = Confession(2.0, 20, heard_at=2.0, final=False)
    busy = running("GPU0", last_heard=90.0, confession=first)
    silent = running("GPU1", confession=Confession(3.0, 20, heard_at=3.0, final=False))
    assert decide([busy, silent], 91.0, limits) == Continue(until=90.0 + EVIDENCE_S)


def test_a_death_before_somebody_elses_nan_is_the_cause() -> None:
    said = Confession(at=4.5, exit_code=20, heard_at=4.5, final=False)
    views = [running("GPU0", confession=said), ended("GPU1", 1, at=4.0, wake=2)]
    stop = decide(views, 8.0, NO_LIMIT)
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


def test_workers_that_fall_silent_together_are_a_tie() -> None:
    views = [running(f"GPU{n}", last_heard=3.0 + n) for n in range(3)]
    tie = decide(views, 70.0, Limits(3.0, 60.0))
    assert isinstance(tie, Stop)
    assert (tie.culprits, tie.tied, tie.is_hang) == ((), ("GPU0", "GPU1", "GPU2"), True)
    assert tie.reason == "every worker silent for 67 s (limit 60 s)"
    views[1].last_heard = 60.0
    named = decide(views, 70.0, Limits(3.0, 60.0))
    assert isinstance(named, Stop)
    assert named.culprits == ("GPU0",)


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


def test_a_worker_may_be_silent_ten_times_as_long_as_its_steps_take() -> None:
    views = [running("CPU0", last_heard=0.0, step_s=50.0), running("CPU1", last_heard=499.0)]
    assert decide(views, 60.0, HALF_A_MINUTE) == Continue(until=500.0)
    stop = decide(views, 500.0, HALF_A_MINUTE)
    assert stop == Stop("CPU0 silent for 500 s (limit 500 s)", 124, ("CPU0",), is_hang=True)
    assert decide(views, 1e6, NO_LIMIT) == Continue()


def test_a_worker_that_waits_for_another_is_given_ten_of_its_beats() -> None:
    views = [running("CPU0", last_heard=3.0, step_s=0.001)]
    limits = Limits(grace_s=10, silence_s=0.5)
    assert decide(views, 3.5, limits) == Continue(until=3.0 + SILENCE_PATIENCE * BEAT_S)


def test_who_ended_well_long_before_the_others_is_told_once_it_is_long() -> None:
    views = [ended("GPU0", 0, at=5, wake=3), running("GPU1"), ended("GPU2", 0, at=9, wake=4)]
    limits = Limits(grace_s=10, silence_s=0, early_s=30)
    assert decide(views, 34.0, limits) == Continue(until=35.0)
    assert ended_early(views, 34.0, limits) == []
    assert decide(views, 35.0, limits) == Continue(until=39.0)
    assert ended_early(views, 35.0, limits) == [views[0]]
    assert ended_early([views[0], views[2]], 60.0, limits) == []


OOM = "the cgroup counted an OOM kill (no limit)"
OF_HOST = "(a fault of this host; `run.sh doctor` looks at its limits)"


def test_a_worker_that_the_kernel_killed_for_memory_is_not_blamed() -> None:
    views = [ended("GPU0", -9, at=41.2, wake=1, oom=OOM), ended("GPU1", 1, at=41.3, wake=2)]
    reason = f"GPU0 was killed for want of host memory: SIGKILL (9) after 41.2 s; {OOM} {OF_HOST}"
    assert decide(views, 60.0, NO_LIMIT) == Stop(reason, 137)


def test_several_that_the_kernel_killed_for_memory_at_once_are_no_tie() -> None:
    views = [ended(f"GPU{i}", -9, at=41.2, wake=1, oom=OOM) for i in range(2)]
    stop = decide(views, 60.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.exit_code, stop.culprits, stop.tied) == (137, (), ())
    assert stop.reason is not None
    assert stop.reason.startswith("GPU0 and GPU1 were killed for want of host memory: SIGKILL (9)")


def test_a_worker_beside_one_that_the_kernel_killed_for_memory_is_tied_with_it() -> None:
    views = [ended("GPU0", -9, at=41.2, wake=1, oom=OOM), ended("GPU1", 1, at=41.2, wake=1)]
    stop = decide(views, 60.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.tied) == ((), ("GPU0", "GPU1"))


def test_a_nan_that_was_announced_before_the_kernel_killed_for_memory_is_blamed() -> None:
    said = Confession(at=2.0, exit_code=20, heard_at=2.0, final=False)
    views = [ended("GPU0", -9, at=41.2, wake=1, oom=OOM, confession=said)]
    stop = decide(views, 60.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)


def test_ended_workers_may_be_silent_for_ever() -> None:
    views = [ended("GPU0", 0, at=1, wake=1), running("GPU1", last_heard=999.0)]
    assert decide(views, 1000.0, HALF_A_MINUTE) == Continue(until=1029.0)


def test_a_worker_that_could_not_start_says_why() -> None:
    views = [
        ended("GPU0", 127, 1.0, 1, spawn_error="ENOENT: foo: No such file"),
    ]
    expected = Stop("GPU0 could not start: ENOENT: foo: No such file", 127, ("GPU0",))
    assert decide(views, 1.0, NO_LIMIT) == expected


def test_a_signal_to_us_is_nobodys_fault() -> None:
    assert stop_for_signal(15) == Stop("SIGTERM received", 143, ())


@pytest.mark.parametrize("code", [-15, 143, -2, 130, -1, 129, -3, 131, -24, 152, -10, 138, 140])
def test_an_end_that_a_request_explains_is_held_for_our_own_copy_of_it(code: int) -> None:
    further = running("GPU1", last_step=3)
    views = [ended("GPU0", code, at=4.0, wake=2, last_step=1), further]
    assert decide(views, 4.0, NO_LIMIT) == Continue(until=4.0 + HOLD_S)
    stop = decide(views, 4.0 + HOLD_S, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)
    assert "failed first" in stop.reason
    assert "after 4.0 s" in stop.reason


@pytest.mark.parametrize("code", [137, -9, 255, 124])
def test_an_end_that_no_request_explains_is_not_held(code: int) -> None:
    assert request_of(code) is None
    views = [ended("GPU0", code, 4.0, 2, last_step=1), running("GPU1", last_step=3)]
    assert isinstance(decide(views, 4.0, NO_LIMIT), Stop)


@pytest.mark.parametrize(
    ("took_s", "moment_s"),
    [(0.04, MOMENT_S), (3.0, 3.0), (LATE_S, LATE_S), (7200.0, LATE_MOMENT_S)],
)
def test_who_ends_with_a_code_of_its_own_leaves_the_others_a_moment_to_do_the_same(
    took_s: float, moment_s: float
) -> None:
    views = [ended("GPU0", 1, at=took_s, wake=2), running("GPU1")]
    over = took_s + moment_s
    assert decide(views, took_s, NO_LIMIT) == Continue(until=took_s + IDLE_S)
    assert isinstance(decide(views, over - 0.001, NO_LIMIT), Continue)
    stop = decide(views, over, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.exit_code) == (("GPU0",), 1)


def test_on_a_busy_machine_one_that_sleeps_may_have_begun_late() -> None:
    busy = Limits(grace_s=10, silence_s=0, moment_s=5 * MOMENT_S)
    views = [ended("GPU0", 1, at=0.3, wake=2), running("GPU1", is_idle=True)]
    assert isinstance(decide(views, 0.4, NO_LIMIT), Stop)
    assert isinstance(decide(views, 0.4 + 4 * MOMENT_S - 0.1, busy), Continue)
    assert isinstance(decide(views, 0.4 + 4 * MOMENT_S, busy), Stop)


@pytest.mark.parametrize(
    ("other", "is_awaited"),
    [
        (running("GPU1"), True),
        (running("GPU1", is_idle=True), False),
        (WorkerView("GPU1", started_at=1.0, is_idle=True), True),
        (running("GPU1", last_step=6), True),
        (running("GPU1", last_step=7), False),
        (ended("GPU1", 1, at=4.01, wake=3), False),
        (ended("GPU1", 0, at=2.0, wake=1), False),
    ],
    ids=["at work", "idle", "younger", "behind", "further", "dead, too", "done"],
)
def test_nobody_is_awaited_who_will_not_end_in_the_same_way(
    other: WorkerView, is_awaited: bool
) -> None:
    first = ended("GPU0", 1, at=4.0, wake=2, last_step=6)
    decided = decide([first, other], 4.0 + AGE_S, NO_LIMIT)
    assert isinstance(decided, Continue) is is_awaited


def test_when_all_have_ended_in_the_same_way_none_was_first() -> None:
    views = [ended("GPU0", 1, at=4.0, wake=2), ended("GPU1", 1, at=4.2, wake=3)]
    names = ("GPU0", "GPU1")
    assert decide(views, 4.2, NO_LIMIT) == Stop(
        "every worker ended with exit code 1", 1, tied=names
    )
    stop = decide([views[0], ended("GPU1", 2, at=4.2, wake=3)], 4.2, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)
    alone = decide(views[:1], 4.2, NO_LIMIT)
    assert isinstance(alone, Stop)
    assert alone.culprits == ("GPU0",)


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGABRT, signal.SIGPIPE, signal.SIGKILL])
def test_a_signal_that_ends_all_is_no_ones(signum: int) -> None:
    views = [ended("GPU0", -signum, at=4.0, wake=2), running("GPU1")]
    assert isinstance(decide(views, 4.1, NO_LIMIT), Continue)
    stop = decide([views[0], ended("GPU1", -signum, at=4.2, wake=3)], 4.2, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.tied, stop.exit_code) == ((), ("GPU0", "GPU1"), 128 + signum)


def test_a_request_that_only_the_workers_got_is_no_ones() -> None:
    said = Confession(at=3.9, exit_code=143, heard_at=3.9, final=True)
    views = [running(f"GPU{n}", confession=said) for n in range(2)]
    views.append(ended("GPU2", 143, at=4.0, wake=2, confession=said))
    stop = decide(views, 3.9 + LINGER_S, NO_LIMIT)
    assert stop == Stop("every worker ended with exit code 143", 143, tied=("GPU0", "GPU1", "GPU2"))


def test_of_ends_that_differ_in_their_last_line_the_first_is_named() -> None:
    views = [
        ended("GPU0", 1, at=4.2, wake=3, last_lines=("Connection reset by peer 1",)),
        ended("GPU1", 1, at=4.0, wake=2, last_lines=("uncorrectable ECC error",)),
    ]
    stop = decide(views, 4.2, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.tied) == (("GPU1",), ())
    views = [ended(f"GPU{n}", 1, 4.0 + n, n, last_lines=(f"at 0x{n}f: {n} s",)) for n in (1, 2)]
    alike = decide(views, 6.0, NO_LIMIT)
    assert isinstance(alike, Stop)
    assert alike.tied == ("GPU1", "GPU2")


def test_an_exit_code_of_a_worker_that_could_not_start_is_judged_at_once() -> None:
    views = [ended("GPU0", 127, at=0.1, wake=2, spawn_error="no such file"), running("GPU1")]
    assert isinstance(decide(views, 0.1, NO_LIMIT), Stop)


def test_an_announced_128_plus_n_is_held_from_the_death_on() -> None:
    said = Confession(at=3.9, exit_code=143, heard_at=3.9, final=True)
    views = [ended("GPU0", 143, at=4.0, wake=2, confession=said), running("GPU1")]
    assert decide(views, 4.0, NO_LIMIT) == Continue(until=4.0 + HOLD_S)


def test_a_nan_is_no_request_whoever_killed_the_worker_then() -> None:
    said = Confession(at=2.0, exit_code=20, heard_at=2.0, final=False)
    views = [ended("GPU0", -15, 4.0, 2, confession=said), running("GPU1")]
    stop = decide(views, 4.0 + SETTLE_S, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)


def test_a_later_failure_waits_with_the_first_and_changes_nothing() -> None:
    views = [ended("GPU0", -15, at=4.0, wake=2), ended("GPU1", 1, at=4.05, wake=3)]
    assert decide(views, 4.05, NO_LIMIT) == Continue(until=4.0 + HOLD_S)
    stop = decide(views, 4.0 + HOLD_S, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.exit_code) == (("GPU0",), 143)


def test_a_failure_that_came_first_by_its_own_stamp_is_judged_at_once() -> None:
    said = Confession(at=3.9, exit_code=7, heard_at=4.05, final=True)
    views = [
        ended("GPU0", -15, at=4.0, wake=2),
        ended("GPU1", 7, at=4.05, wake=3, confession=said),
    ]
    stop = decide(views, 4.05, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.exit_code) == (("GPU1",), 7)


def test_several_that_one_signal_ended_are_told_as_any_tie() -> None:
    views = [ended("GPU0", -15, at=4.0, wake=2), ended("GPU1", 143, at=4.0, wake=2)]
    assert decide(views, 4.1, NO_LIMIT) == Continue(until=4.0 + HOLD_S)
    stop = decide(views, 4.3, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert (stop.culprits, stop.tied, stop.exit_code) == ((), ("GPU0", "GPU1"), 143)


def test_a_notice_that_we_got_and_that_ended_a_worker_is_the_reason() -> None:
    views = [ended("GPU0", -10, at=4.0, wake=2), running("GPU1")]
    expected = Stop("SIGUSR1 received, which ended GPU0", 138, ())
    assert decide(views, 4.0, NO_LIMIT, received={10}) == expected
    assert decide(views, 4.0, NO_LIMIT, received={12}) == Continue(until=4.0 + HOLD_S)


def failed_in(step: int | None, code: int = 20, at: float = 4.0) -> WorkerView:
    said = Confession(at=at, exit_code=code, heard_at=at, final=True, step=step)
    return ended("GPU0", code, at=at + 0.1, wake=2, confession=said)


@pytest.mark.parametrize("step", [3, None])
def test_what_a_worker_told_the_others_get_time_to_share(step: int | None) -> None:
    first, peer = failed_in(step), running("GPU1", last_step=None if step is None else step - 1)
    until = 4.1 + SETTLE_S
    where = "before its first step" if step is None else "in step 3"
    why = f"GPU0 failed {where}: 5 s at most for GPU1 to come further, or to fail there, too"
    assert decide([first, peer], 4.1, HALF_A_MINUTE) == Continue(until, why)
    stop = decide([first, peer], until, HALF_A_MINUTE)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)
    peer.last_step = step or 0
    assert isinstance(decide([first, peer], 4.1, HALF_A_MINUTE), Stop)


def test_slow_peers_get_two_steps() -> None:
    peers = [running("GPU1", last_step=2, step_s=30.0), running("GPU2", last_step=3, step_s=90.0)]
    until = 4.1 + SETTLE_STEPS * 30.0
    going_on = decide([failed_in(3), *peers], 4.1, NO_LIMIT)
    assert isinstance(going_on, Continue)
    assert (going_on.until, "60 s at most for GPU1 to" in going_on.why) == (until, True)


@pytest.mark.parametrize("step", [0, None])
def test_one_that_has_not_begun_gets_as_long_again_as_the_first_took(step: int | None) -> None:
    peers = [running("GPU1", last_step=0), running("GPU2")]
    first = failed_in(step, code=2, at=40.0)
    going_on = decide([first, *peers], 40.1, NO_LIMIT)
    assert isinstance(going_on, Continue)
    assert going_on.until == pytest.approx(80.2)
    assert "40 s at most for GPU2 to" in going_on.why
    peers[1].confession = Confession(at=70.0, exit_code=2, heard_at=70.0, final=True, step=step)
    assert isinstance(decide([first, *peers], 70.0, NO_LIMIT), Stop)


@pytest.mark.parametrize("how", ["failed too", "ended well", "not started"])
def test_nobody_waits_for_a_worker_that_has_nothing_to_show(how: str) -> None:
    said = Confession(at=5.0, exit_code=1, heard_at=5.0, final=True)
    peer = {
        "failed too": running("GPU1", confession=said),
        "ended well": ended("GPU1", 0, at=3.0, wake=1),
        "not started": WorkerView("GPU1"),
    }[how]
    stop = decide([failed_in(3), peer], 5.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)


def test_a_peer_that_met_its_nan_later_saves_its_evidence_first() -> None:
    said = Confession(at=4.5, exit_code=20, heard_at=4.5, final=False, step=3)
    peer = running("GPU1", confession=said)
    assert decide([failed_in(3), peer], 5.0, NO_LIMIT) == Continue(until=4.5 + EVIDENCE_S)
    peer.returncode, peer.ended_at = 20, 6.0
    stop = decide([failed_in(3), peer], 6.0, NO_LIMIT)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU0",)


def test_a_death_that_was_not_told_and_a_signal_end_the_run_at_once() -> None:
    peer = running("GPU1", last_step=2)
    assert isinstance(decide([ended("GPU0", 1, at=4, wake=2), peer], 4.1, NO_LIMIT), Stop)
    terminated = failed_in(3, code=143)
    assert isinstance(decide([terminated, peer], 4.1 + HOLD_S, NO_LIMIT), Stop)


JOB = Limits(grace_s=10, silence_s=30, is_job=True)


def lost(at: float) -> Confession:
    """Of a rank that could not go on because of another one."""
    return Confession(at, 1, at, True, step=3, peer_lost=True)


def test_a_rank_that_lost_a_peer_is_never_blamed_before_that_peer() -> None:
    follower = running("GPU0", confession=lost(4.0), error="another rank is gone")
    died = ended("GPU1", -9, at=4.1, wake=7)
    stop = decide([follower, died], 4.2, JOB)
    assert isinstance(stop, Stop)
    assert (stop.exit_code, stop.culprits) == (137, ("GPU1",))
    dead_follower = ended("GPU0", 1, at=4.05, wake=6, confession=lost(4.0))
    stop = decide([dead_follower, died], 4.2, JOB)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU1",)


def test_ranks_that_lost_a_peer_are_asked_for_a_while_which_one() -> None:
    views = [running("GPU0", confession=lost(4.0)), running("GPU1")]
    assert decide(views, 4.1, JOB) == Continue(until=4.0 + FOLLOW_S)


def test_the_rank_that_nobody_heard_of_is_the_one_that_did_not_come() -> None:
    said = "another rank did not come in 60 s"
    views = [
        ended("GPU0", 1, at=4.2, wake=3, confession=lost(4.0), error=said),
        running("GPU1", last_heard=3.9),
        running("GPU2", confession=lost(4.1), error=said),
    ]
    stop = decide(views, 4.0 + FOLLOW_S, JOB)
    told = f"GPU1 did not come where the others waited (GPU0: {said})"
    assert stop == Stop(told, EXIT_HANG, ("GPU1",), is_hang=True)


def test_where_all_ranks_lost_a_peer_none_is_named() -> None:
    """As when all of them were stopped for a while."""
    views = [ended(f"GPU{n}", 1, 4.2, 3, confession=lost(4.1 - n / 10)) for n in range(2)]
    stop = decide(views, 4.1 + FOLLOW_S, JOB)
    assert isinstance(stop, Stop)
    assert (stop.exit_code, stop.culprits) == (1, ())


def test_ranks_of_a_job_get_a_moment_to_fail_as_the_first_one_and_no_line_tells_it() -> None:
    failed = ended("GPU1", 20, at=4.1, wake=7, confession=Confession(4.0, 20, 4.0, True, step=3))
    peer = running("GPU0", last_step=2)
    assert decide([peer, failed], 4.2, JOB) == Continue(until=4.1 + FOLLOW_S)
    stop = decide([peer, failed], 4.1 + FOLLOW_S, JOB)
    assert isinstance(stop, Stop)
    assert stop.culprits == ("GPU1",)


def test_a_rank_that_lost_the_failed_one_has_nothing_more_to_tell() -> None:
    failed = ended("GPU1", 20, at=4.1, wake=7, confession=Confession(4.0, 20, 4.0, True, step=3))
    follower = running("GPU0", last_step=2, confession=lost(4.1))
    assert isinstance(decide([follower, failed], 4.2, JOB), Stop)


def test_ranks_that_leave_do_not_cut_off_the_evidence_of_the_one_that_met_a_nan() -> None:
    saving = running("GPU1", last_heard=4.0, confession=Confession(4.0, 20, 4.0, False, step=3))
    follower = ended("GPU0", 1, at=4.2, wake=7, confession=lost(4.1))
    assert isinstance(decide([follower, saving], 9.0, JOB), Continue)
