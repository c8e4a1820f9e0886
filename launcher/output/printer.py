"""The terminal, behind a bounded queue and a thread of its own: the loop never waits for it.

Lines come in whole and go out whole. A slow terminal makes us drop lines, which are counted; for a
terminal that is gone, all lines are dropped. The log files have them all.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.output.append_file import AppendFile
from launcher.output.own_lines import for_terminal
from launcher.output.panel import REDRAW_S, Draw, Panel, can_have_one, other_lines
from model_check.utils.threads import start_without_signals
from model_check.utils.words import printable_lines

LAUNCHER_PREFIX = "[launcher] "
DRAIN_S = 2.0
_QUEUE_BYTES = 8 << 20
_OWN_QUEUE_BYTES = 9 << 20
"""Our own lines still fit when the workers' lines no longer do: they say why the run ended."""
_WRITE_BYTES = 1 << 18
"""After each write this thread waits for the loop's turn to end: at 64 KiB it fell behind a flood
that the terminal could take."""


class Printer:
    """Lines to one file descriptor (which it does not own: it neither closes nor changes it)."""

    def __init__(
        self, fd: int, launcher_log: Path | None = None, *, is_plain: bool = False
    ) -> None:
        """`is_plain`: lines alone, also on a terminal."""
        self._fd = fd
        self._panel = None if is_plain or not can_have_one(fd) else Panel(fd)
        self._log = AppendFile(launcher_log, self._say_to_terminal) if launcher_log else None
        self._lock = threading.Condition()
        self._blocks: deque[bytes] = deque()
        self._queued_bytes = 0
        self._untold_lines = 0
        # Closed, or the terminal is gone: further lines are dropped.
        self._closing = False
        self._thread: threading.Thread | None = None
        self.dropped_lines = 0
        """Lines that a slow terminal did not show, so far."""

    @property
    def has_reader(self) -> bool:
        """Whether a person sees them: on a terminal."""
        return os.isatty(self._fd)

    @contextmanager
    def showing(self, draw: Draw) -> Iterator[None]:
        """Keep what `draw` makes below all lines, and leave the lines of steps out meanwhile. The
        thread that writes calls it four times a second. On what is no terminal nothing happens."""
        if self._panel is None:
            yield
            return
        with self._lock:
            self._panel.show(draw)
            self._start_thread()
            self._lock.notify()
        try:
            yield
        finally:
            with self._lock:
                self._panel.hide()
                self._lock.notify()

    def lines(self, prefix: str, texts: Sequence[str]) -> None:
        """Lines that are safe to print (`view.escape`), without another's between them. Those of
        our own programs, which a panel tells of, are broken as the launcher's are."""
        panel = self._panel if self._panel is not None and self._panel.is_wanted else None
        if panel is not None and panel.has_place:
            texts = other_lines(texts)
        if panel is not None or prefix == LAUNCHER_PREFIX:
            texts = for_terminal(texts, self._fd, prefix)
        if texts:
            self._put(_block(prefix, texts), len(texts), _QUEUE_BYTES)

    def say(self, text: str) -> None:
        """A message of the launcher, to the terminal and to its log. Several lines are fine."""
        self.note(text)
        self._say_to_terminal(text)

    def note(self, text: str) -> None:
        """A message of the launcher for its log alone."""
        if self._log is not None:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime())
            self._log.write(_block(when, _own_lines(text)))

    def close(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait for the queue to drain, no longer than `timeout_s`; whether it did. Later lines are
        dropped."""
        with self._lock:
            self._tell_dropped()
            if self._blocks:
                self._start_thread()
            self._closing = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            is_drained = not self._thread.is_alive()
        else:  # no thread could be made all run long: nobody else writes
            is_drained = self._write_unthreaded(time.monotonic() + timeout_s)
        if self._log is not None:
            self._log.close()
        return is_drained

    def _write_unthreaded(self, deadline: float) -> bool:
        """Whether the terminal took all until then."""
        waiter = select.poll()
        waiter.register(self._fd, select.POLLOUT)
        while data := self._take():
            for at in range(0, len(data), select.PIPE_BUF):  # so much fits in a pipe that is ready
                if not waiter.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
                if not write_all(self._fd, data[at : at + select.PIPE_BUF]):
                    return True
        return True

    def _say_to_terminal(self, text: str) -> None:
        lines = for_terminal(_own_lines(text), self._fd, LAUNCHER_PREFIX)
        self._put(_block(LAUNCHER_PREFIX, lines), len(lines), _OWN_QUEUE_BYTES)

    def _put(self, block: bytes, num_lines: int, limit_bytes: int) -> None:
        with self._lock:
            if self._closing:
                return
            if self._queued_bytes + len(block) > limit_bytes:
                self.dropped_lines += num_lines
                self._untold_lines += num_lines
                return
            self._tell_dropped()
            self._append(block)
            self._start_thread()

    def _start_thread(self) -> None:
        """At the first line. If no thread can be made, the lines wait for the next try."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name="printer", daemon=True)
        # "can't start new thread": the workers, which are about to end, have them all.
        with suppress(RuntimeError):
            start_without_signals(thread)
            self._thread = thread

    def _tell_dropped(self) -> None:
        if self._untold_lines:
            told = f"terminal too slow: {self._untold_lines} lines not shown; the logs have them"
            self._append(_block(LAUNCHER_PREFIX, (told,)))
            self._untold_lines = 0

    def _append(self, block: bytes) -> None:
        self._blocks.append(block)
        self._queued_bytes += len(block)
        self._lock.notify()

    def _work(self) -> None:
        while (data := self._take()) is not None:
            if self._panel is not None:
                data = self._panel.below(data)
            if not write_all(self._fd, data):
                with self._lock:
                    self._closing = True
                    self._blocks.clear()
                return
            if self._panel is not None:
                self._panel.wrote()

    def _take(self) -> bytes | None:
        """Whole lines for one write, about 256 KiB; empty when it is time to draw the panel again,
        or to take it away; None when closed and drained."""
        with self._lock:
            panel, data = self._panel, bytearray()
            is_wanted = panel is not None and panel.is_wanted and not self._closing
            wait_s = REDRAW_S if is_wanted else None
            self._lock.wait_for(lambda: self._blocks or self._closing or self._spoils, wait_s)
            while self._blocks and len(data) < _WRITE_BYTES:
                data += self._blocks.popleft()
            self._queued_bytes -= len(data)
            if self._closing and panel is not None:
                panel.hide()
            return None if self._closing and not (data or self._spoils) else bytes(data)

    @property
    def _spoils(self) -> bool:
        """Whether a panel stands there that nobody wants any more."""
        panel = self._panel
        return panel is not None and panel.is_shown and not panel.is_wanted


def write_all(fd: int, data: bytes | bytearray) -> bool:
    """Write everything, however long it takes; False: the reader is gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another user of this terminal made it non-blocking
            waiter = select.poll()
            waiter.register(fd, select.POLLOUT)
            waiter.poll()
        except OSError:  # EPIPE, EIO, EBADF: the terminal is gone
            return False
    return True


def _own_lines(text: str) -> list[str]:
    return printable_lines(text.replace("\r", "")).split("\n")


def _block(prefix: str, texts: Sequence[str]) -> bytes:
    text = prefix + f"\n{prefix}".join(texts) + "\n"
    return text.encode(errors="backslashreplace")
