"""The end of the link on every node but the first: it connects, and says what it has to say."""

import selectors
import socket
import time
from collections.abc import Sequence

from launcher.nodes.link import ANSWER_S, RETRY_S, Link
from launcher.nodes.messages import Beat, Gone, Message, Refusal
from launcher.nodes.wire import Wire

_CONNECT_S = 3.0
_ANOTHER_PORT = "set MASTER_PORT to a free port, the same on all nodes"


class FurtherNode(Link):
    """That of every other node."""

    def _begin(self) -> None:
        self._wire: Wire | None = None
        self._is_welcome = False
        self._waiting: list[Message] = [self.hello]
        """What is said before the first node has answered."""
        self._again_at = 0.0
        self._failing_since: float | None = None

    @property
    def _wires(self) -> Sequence[Wire]:
        return [] if self._wire is None else [self._wire]

    def _send(self, message: Message) -> None:
        if self._wire is None or not self._is_welcome:
            self._waiting.append(message)
        if self._wire is not None:
            self._wire.send(message)

    def _serve(self, key: selectors.SelectorKey, now: float) -> None:
        wire: Wire = key.data
        messages = wire.read(now)
        for message in messages or ():
            if isinstance(message, Refusal):
                self._heed(message, now)
                return
            if not isinstance(message, Beat):
                self._is_welcome = True
                self._record(message)
        if messages is None and not self._is_welcome:
            self._try_again("another program answers there, or a launcher of another version", now)
        elif messages is None:
            self._lose(Gone(0, f"node {self.names[0]} is gone: {wire.why_lost}", has_ended=True))

    def _turn(self, now: float) -> None:
        if self._is_gone(0) or self.refused is not None:
            return
        if self._wire is None:
            self._connect(now)
        elif not self._is_welcome and now - self._wire.since > ANSWER_S:
            self._try_again(
                f"another program answers there, or the launcher of {self.names[0]} is stopped: "
                f"nothing was said in {ANSWER_S:.0f} s",
                now,
            )
        elif self._is_welcome and (gone := self._silent(0, now, self._wire)) is not None:
            self._lose(gone)

    def _connect(self, now: float) -> None:
        if now < self._again_at:
            return
        self._again_at = now + RETRY_S
        try:
            made = socket.create_connection((self.address, self.port), timeout=_CONNECT_S)
        except OSError as error:
            self._failing_since = None  # who answered there has left
            if now >= self._until:
                how = error.strerror or error  # a timeout has no strerror
                self._record(Gone(0, f"node {self.names[0]} did not come ({self.address}: {how})"))
            return
        if made.getsockname() == made.getpeername():
            made.close()  # TCP has joined this socket to itself: nobody listens there yet
            return
        self.local_address = made.getsockname()[0]
        self._wire = Wire(made, time.monotonic())
        self._selector.register(made, selectors.EVENT_READ, self._wire)
        self._wire.send(*self._waiting)

    def _heed(self, refusal: Refusal, now: float) -> None:
        if refusal.is_final:
            self._hang_up()
            self._refuse(refusal.why)
        else:
            self._try_again(refusal.why, now)

    def _try_again(self, why: str, now: float) -> None:
        """The launcher of an earlier attempt may still be leaving."""
        self._hang_up()
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= ANSWER_S:
            self._refuse(f"port {self.port} of {self.address}: {why}; {_ANOTHER_PORT}")

    def _lose(self, gone: Gone) -> None:
        self._hang_up()
        if not self._is_gone(0):
            self._record(gone)

    def _hang_up(self) -> None:
        assert self._wire is not None
        self._selector.unregister(self._wire.socket)
        self._wire.close()
        self._wire = None
