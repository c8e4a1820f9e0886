"""Signals are the main thread's."""

import signal
import threading
from pathlib import Path

from model_check.utils.threads import start_without_signals

ROOT = Path(__file__).parents[2]


def blocked() -> set[int]:
    return {*signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def test_a_thread_takes_no_signal_and_who_starts_it_takes_those_as_before() -> None:
    before, found = blocked(), set[int]()
    thread = threading.Thread(target=lambda: found.update(blocked()))
    start_without_signals(thread)
    thread.join()
    assert {signal.SIGTSTP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= found
    assert blocked() == before


def test_every_thread_of_the_launcher_is_started_so() -> None:
    for path in (ROOT / "launcher").rglob("*.py"):
        text = path.read_text()
        num_made = text.count("Thread(target=")
        num_started = text.count("start_without_signals(")
        assert num_made == num_started, path
