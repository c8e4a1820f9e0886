"""Real signals to this very process."""

import os
import signal
import threading

import pytest

from model_check.engine.stop import StopSignal, Terminated
from tests.deadline import DEADLINE_S


def signal_and_wait(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)
    threading.Event().wait(DEADLINE_S)


def test_outside_of_training_a_signal_ends_the_work_at_once() -> None:
    stop = StopSignal()
    with stop.installed(), stop.heeded(), pytest.raises(Terminated) as caught:
        signal_and_wait(signal.SIGTERM)
    assert caught.value.signum == signal.SIGTERM
    assert not stop.cut_short


def test_while_training_it_is_noted_and_the_step_is_finished() -> None:
    with StopSignal().installed() as stop, stop.heeded(), stop.deferred():
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        finished = sum(range(10_000))
        assert stop.signum == signal.SIGTERM
        with pytest.raises(Terminated):
            stop.check()
    assert finished


def test_a_step_that_does_not_finish_is_cut_short() -> None:
    stop = StopSignal(finish_step_s=0.02)
    with stop.installed(), stop.heeded(), stop.deferred(), pytest.raises(Terminated):
        signal_and_wait(signal.SIGTERM)
    assert stop.cut_short


def test_a_second_signal_cuts_it_short_too() -> None:
    stop = StopSignal()
    with stop.installed(), stop.heeded(), stop.deferred(), pytest.raises(Terminated):
        signal_and_wait(signal.SIGTERM, signal.SIGINT)


def test_afterwards_everything_is_as_before() -> None:
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(name) for name in names]
    with StopSignal().installed():
        assert [signal.getsignal(name) for name in names] != before
    assert [signal.getsignal(name) for name in names] == before


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal().installed():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_usr1_is_noted_and_stops_nothing_by_itself() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal().installed() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.notice == signal.SIGUSR1
        assert (stop.asked(on_notice=False), stop.asked(on_notice=True)) == (False, True)
        stop.check()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_term_that_counts_as_a_notice_stops_only_the_second_time() -> None:
    stop = StopSignal(finish_step_s=0.02)
    with stop.installed(), stop.heeded(), stop.deferred():
        stop.take_as_notice(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.check()
        assert (stop.notice, stop.signum) == (signal.SIGTERM, None)
        with pytest.raises(Terminated):
            signal_and_wait(signal.SIGTERM)


def test_outside_of_training_a_term_ends_at_once_whatever_it_counts_as() -> None:
    stop = StopSignal()
    stop.take_as_notice(signal.SIGTERM)
    with stop.installed(), stop.heeded(), pytest.raises(Terminated):
        signal_and_wait(signal.SIGTERM)
