"""Threads beside the one that waits for signals."""

import signal
from threading import Thread


def start_without_signals(thread: Thread) -> None:
    """Starts it with all signals blocked. What the main thread has blocked, to wait for it, the
    kernel gives to any other thread that has not: it would be lost, or stop this process while its
    workers run on. Raises RuntimeError where there is no room for another thread."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
