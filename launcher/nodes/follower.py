"""The end of the link on every node but the first: it connects, and says what it has to say."""

import asyncio
import socket
import time
from collections.abc import Sequence

from launcher.nodes.link import ANSWER_S, RETRY_S, Connection, Link
from launcher.nodes.messages import MAX_LINE_BYTES, Heartbeat, JoinRejected, Message
from model_check.errors import EXIT_USAGE

_CONNECT_S = 3.0
_ANOTHER_PORT = "set MASTER_PORT to a free port, the same on all nodes"


class Follower(Link):
    def _open(self) -> None:
        self._connection: Connection | None = None
        self._is_welcome = False
        self._waiting: list[Message] = [self.join]
        """What is said before the first node has answered."""

    @property
    def _connections(self) -> Sequence[Connection]:
        return [] if self._connection is None else [self._connection]

    def _send(self, message: Message) -> None:
        if not self._is_welcome:
            self._waiting.append(message)
        for each in self._connections:
            each.send(message)

    async def _serve(self) -> None:
        """The launcher of an earlier attempt may still be leaving, and answer there."""
        failing_since: float | None = None
        while not self.is_cut_off:
            if (made := self._connect()) is None:
                failing_since = None  # who answered there has left
            else:
                why = await self._talk(made)
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since >= ANSWER_S and not self.is_cut_off:
                    where = f"port {self.port} of {self.address}"
                    self._cut_off(f"{where}: {why}; {_ANOTHER_PORT}", EXIT_USAGE)
            await asyncio.sleep(RETRY_S)

    def _connect(self) -> socket.socket | None:
        """It may wait: there is nobody to hear yet."""
        try:
            made = socket.create_connection((self.address, self.port), timeout=_CONNECT_S)
        except OSError as error:
            if time.monotonic() >= self._until:
                how = error.strerror or error  # a timeout has no strerror
                self._lose(f"node {self.names[0]} did not come ({self.address}: {how})", True)
            return None
        if made.getsockname() == made.getpeername():
            made.close()  # TCP has joined this socket to itself: nobody listens there yet
            return None
        made.setblocking(False)
        return made

    async def _talk(self, made: socket.socket) -> str:
        """Until it ends; why this launcher was not let in."""
        connection = Connection(*await asyncio.open_connection(sock=made, limit=MAX_LINE_BYTES))
        self._connection, self.local_address = connection, connection.local_address
        connection.send(*self._waiting)
        try:
            return await self._hear(connection)
        except TimeoutError:
            return (
                f"another program answers there, or the launcher of {self.names[0]} is stopped: "
                f"nothing was said in {ANSWER_S:.0f} s"
            )
        finally:
            self._connection = None
            await connection.close()

    async def _hear(self, connection: Connection) -> str:
        while True:
            patience_s = None if self._is_welcome else ANSWER_S
            message = await asyncio.wait_for(connection.read(), patience_s)
            if message is None:
                break
            if isinstance(message, JoinRejected):
                if message.is_final:
                    self._cut_off(message.why, EXIT_USAGE)
                return message.why
            if not isinstance(message, Heartbeat):
                self._is_welcome = True
                self._record(message)
        if self._is_welcome:
            self._lose(f"node {self.names[0]} is gone: {connection.why_lost}", False)
        return "another program answers there, or a launcher of another version"

    def _check(self, now: float) -> None:
        for each in self._connections if self._is_welcome else ():
            if (why := self._silence(0, now, each)) is not None:
                self._lose(why, True)
                each.hang_up()

    def _lose(self, why: str, may_come: bool) -> None:
        self.is_cut_off = True
        for message in self._lost(0, why, may_come):
            self._record(message)
