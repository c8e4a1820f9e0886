"""The inbox of signals: what was received, in the order that counts."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from signal import Signals

from launcher.supervise.signals import SignalInbox
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]
TSTP, CONT, USR1, INT = Signals.SIGTSTP, Signals.SIGCONT, Signals.SIGUSR1, Signals.SIGINT


def received(*sent: Signals) -> list[Signals]:
    """What an inbox gives when this process gets all of these before it looks."""
    with SignalInbox() as inbox:
        for signum in sent:
            os.kill(os.getpid(), signum)
        return inbox.take()


def test_signals_are_taken_in_the_order_in_which_they_came() -> None:
    assert received(Signals.SIGUSR2, USR1, INT, INT) == [Signals.SIGUSR2, USR1, INT, INT]


ASK = """
import os, select, signal, sys
from launcher.supervise.signals import SignalInbox
with SignalInbox() as inbox:
    for signum in sys.argv[1:]:
        os.kill(os.getpid(), int(signum))
    asked = select.select([inbox.stop_fd], [], [], 0)[0]
    inbox.discard_stop()
    assert not select.select([inbox.stop_fd], [], [], 0)[0]
sys.exit(bool(asked))
"""


def is_asked_to_stop(*sent: Signals) -> bool:
    """Whether an inbox says so when its process has got all of these. A process of its own: here
    pytest's threads do not block the signal."""
    command = [sys.executable, "-c", ASK, *(str(int(signum)) for signum in sent)]
    return bool(subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S).returncode)


def test_a_stop_that_a_later_cont_takes_back_never_happened() -> None:
    assert not is_asked_to_stop(TSTP, CONT)
    assert not is_asked_to_stop(TSTP, USR1, TSTP, CONT)


def test_a_stop_after_a_cont_counts() -> None:
    assert is_asked_to_stop(CONT, TSTP)
    assert is_asked_to_stop(TSTP, CONT, TSTP)


def test_an_ignored_stop_stays_ignored() -> None:
    before = signal.signal(TSTP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), TSTP)
            assert inbox.stop_fd is None
    finally:
        signal.signal(TSTP, before)


def test_a_signal_of_somebody_elses_handler_is_not_taken() -> None:
    before = signal.signal(Signals.SIGWINCH, lambda number, frame: None)
    try:
        assert received(Signals.SIGWINCH, USR1) == [USR1]
    finally:
        signal.signal(Signals.SIGWINCH, before)


def test_an_inbox_leaves_everything_as_it_was() -> None:
    before = [signal.getsignal(n) for n in range(1, 32)]
    received(USR1)
    assert [signal.getsignal(n) for n in range(1, 32)] == before
