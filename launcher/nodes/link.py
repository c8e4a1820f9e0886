"""The link between the launchers of one job: a thread that keeps one log of messages, in one order.

The first node's launcher listens; whatever a node says goes to it, gets its place in the log there,
and from there to all nodes. So all of them know which of two failures was told first, and no clock
is compared with another machine's. Each side beats, and a side that is silent for too long is gone.
"""

import os
import selectors
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from launcher.nodes.messages import Beat, Broken, Failure, Gone, Hello, Message, Over, Refused
from launcher.nodes.wire import Wire
from model_check.errors import EXIT_INTERNAL
from model_check.utils.words import first_line

BEAT_S = 1.0
ANSWER_S = 5.0
"""A launcher answers a greeting so soon; who does not is another program."""
RETRY_S = 0.2
_PAUSE_S = 1.0
"""Overslept by more than this, we were stopped, and silence proves nothing."""
_LAST_WORDS_S = 2.0


class Link:
    """This launcher's end. `start` it, then read `log`; methods are for the main thread."""

    def __init__(
        self, hello: Hello | Refused, names: Sequence[str], address: str, port: int
    ) -> None:
        """`hello`: the first word. `names`: of all nodes."""
        self.hello, self.names = hello, names
        self.address, self.port = address, port
        self.log: list[Message] = []
        """What all nodes said, in the order of the first node's launcher. It only grows."""
        self.refused: str | None = None
        """Why this launcher may not join, and what to do."""
        self.fault: str | None = None
        """The traceback of a fault of ours that has ended the link."""
        self.local_address: str | None = None
        """Ours, as the other nodes see it."""
        self.limit_s = 0.0
        """Longest silence of a node, once it has come."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the log has grown."""
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._said: deque[Message] = deque()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._work, name="nodes", daemon=True)

    def start(self, limit_s: float, until: float) -> None:
        """`until`: when all must have come, monotonic seconds. Raises ConfigError for a port that
        somebody else has."""
        self.limit_s, self._until = limit_s, until
        self._begin()
        self._thread.start()

    def say(self, message: Message) -> None:
        """To all nodes; it is in the log when it has its place there."""
        if self._closing:
            return
        self._said.append(message)
        os.eventfd_write(self._woken, 1)

    def drain(self) -> None:
        """All of the log was seen: `fd` is readable when there is more."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def wait(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Until the log tells it; whether it does."""
        with self._changed:
            return self._changed.wait_for(is_there, seconds)

    def close(self) -> None:
        """What was said is on its way; then nothing more is."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._woken, 1)
        self._thread.join(_LAST_WORDS_S + BEAT_S)
        if not self._thread.is_alive():
            os.close(self.fd)
            os.close(self._woken)

    # -- the thread

    def _begin(self) -> None:
        raise NotImplementedError

    def _turn(self, now: float) -> None:
        """What is due: beats, silences, new connections."""
        raise NotImplementedError

    def _send(self, message: Message) -> None:
        """Ours, on its way to the log."""
        raise NotImplementedError

    def _serve(self, key: selectors.SelectorKey, now: float) -> None:
        raise NotImplementedError

    @property
    def _wires(self) -> Sequence[Wire]:
        raise NotImplementedError

    def _work(self) -> None:
        """The thread has no other backstop: a fault in it ends the job on all nodes."""
        try:
            self._run()
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Ours, so it is told here, and, as far as a connection stands, there."""
        self.fault = traceback.format_exc()
        why = (
            "a fault of Model Check itself in the link between the launchers: "
            f"{type(error).__name__}: {first_line(error)}"
        )
        self._record(Broken(why))
        with suppress(Exception):
            failure = Failure(
                node=self.hello.node, worker=None, step=None, cause=why, exit_code=EXIT_INTERNAL
            )
            for wire in self._wires:
                wire.send(failure)
        with suppress(Exception):
            self._hang_up_all()

    def _run(self) -> None:
        beaten, slept_from = 0.0, time.monotonic()
        while not self._closing:
            ready = self._selector.select(RETRY_S)
            now = time.monotonic()
            if now - slept_from > RETRY_S + _PAUSE_S:
                self._forgive(now - slept_from)
            for key, _ in ready:
                self._serve(key, now) if key.fileobj != self._woken else self._pass_on()
            if now - beaten >= BEAT_S:
                beaten = now
                for wire in self._wires:
                    wire.send(Beat())
            self._turn(now)
            slept_from = time.monotonic()
        self._finish()

    def _pass_on(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        while self._said:
            self._send(self._said.popleft())

    def _forgive(self, paused_s: float) -> None:
        for wire in self._wires:
            wire.heard_at += paused_s

    def _record(self, message: Message) -> None:
        with self._changed:
            self.log.append(message)
            self._changed.notify_all()
        os.eventfd_write(self.fd, 1)

    def _refuse(self, why: str) -> None:
        with self._changed:
            self.refused = self.refused or why
            self._changed.notify_all()

    def _is_gone(self, node: int) -> bool:
        return any(isinstance(m, Gone | Over) and m.node == node for m in self.log)

    def _silent(self, node: int, now: float, wire: Wire) -> Gone | None:
        silent_s = now - wire.heard_at
        if silent_s < self.limit_s:
            return None
        return Gone(node, f"node {self.names[node]} not heard for {silent_s:.0f} s")

    def _finish(self) -> None:
        self._pass_on()
        self._hang_up_all()

    def _hang_up_all(self) -> None:
        until = time.monotonic() + _LAST_WORDS_S
        while any(not wire.is_flushed for wire in self._wires) and time.monotonic() < until:
            time.sleep(0.01)
            for wire in self._wires:
                wire.flush()
        for wire in self._wires:
            wire.close()
        self._selector.close()
