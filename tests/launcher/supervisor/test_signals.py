"""The inbox of signals: what was received, in the order that counts."""

import os
import signal
from signal import Signals

from launcher.signals import SignalInbox, in_order, settled

TSTP, CONT, USR1, INT = Signals.SIGTSTP, Signals.SIGCONT, Signals.SIGUSR1, Signals.SIGINT


def received(*sent: Signals) -> list[Signals]:
    """What an inbox gives when this process gets all of these before it looks."""
    with SignalInbox() as inbox:
        for signum in sent:
            os.kill(os.getpid(), signum)
        return inbox.take()


def test_signals_are_taken_in_the_order_in_which_they_came() -> None:
    assert received(Signals.SIGUSR2, USR1, INT, INT) == [Signals.SIGUSR2, USR1, INT, INT]


def test_a_stop_that_a_later_cont_takes_back_never_happened() -> None:
    assert received(TSTP, CONT) == [CONT]
    assert received(TSTP, USR1, TSTP, CONT) == [USR1, CONT]


def test_a_stop_after_a_cont_counts() -> None:
    assert received(CONT, TSTP) == [CONT, TSTP]
    assert received(TSTP, CONT, TSTP) == [CONT, TSTP]


def test_the_wake_up_descriptor_knows_the_order_and_the_handlers_what_was_sent() -> None:
    by_number = [CONT, TSTP]  # Python calls the handlers of pending signals by number
    assert settled(in_order(by_number, bytes([TSTP, CONT]))) == [CONT]
    assert settled(in_order(by_number, bytes([CONT, TSTP]))) == [CONT, TSTP]
    assert in_order([INT, INT], bytes([INT])) == [INT, INT], "its buffer was full"
    assert in_order([], bytes([USR1])) == [], "its handler has not been called yet"


def test_an_inbox_leaves_everything_as_it_was() -> None:
    before = [signal.getsignal(n) for n in range(1, 32)]
    received(USR1)
    assert [signal.getsignal(n) for n in range(1, 32)] == before
