"""The end of the link on every node but the first: it connects, and says what it has to say."""

import asyncio
import socket
import time

from launcher.nodes.link import ANSWER_S, RETRY_S, Connection, Link
from launcher.nodes.messages import MAX_LINE_BYTES, Heartbeat, JoinRejected, Message
from model_check.errors import EXIT_USAGE

_CONNECT_S = 3.0
_ANOTHER_PORT = "set MASTER_PORT to a free port, the same on all nodes"


class Follower(Link):
    def _open(self) -> None:
        self._waiting: list[Message] = []
        """What is said before the first node has let this one in."""

    def _send(self, message: Message) -> None:
        for each in self._here.values():
            each.send(message)
        if not self._here:
            self._waiting.append(message)

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
            is_itself = made.getsockname() == made.getpeername()
        except OSError as error:
            if time.monotonic() >= self._until:
                how = error.strerror or error  # a timeout has no strerror
                self._lose(0, f"did not come ({self.address}: {how})", True)
            return None
        if is_itself:
            made.close()  # TCP has joined this socket to itself: nobody listens there yet
            return None
        made.setblocking(False)
        return made

    async def _talk(self, made: socket.socket) -> str:
        """Until it ends; why this launcher was not let in."""
        connection = Connection(*await asyncio.open_connection(sock=made, limit=MAX_LINE_BYTES))
        connection.send(self.join)
        try:
            first = await asyncio.wait_for(connection.read(), ANSWER_S)
            if isinstance(first, JoinRejected):
                if first.is_final:
                    self._cut_off(first.why, EXIT_USAGE)
                return first.why
            if first is not None:
                await self._hear(connection, first)
            return "another program answers there, or a launcher of another version"
        except TimeoutError:
            return (
                f"another program answers there, or the launcher of {self.names[0]} is stopped: "
                f"nothing was said in {ANSWER_S:.0f} s"
            )
        finally:
            await connection.close()

    async def _hear(self, connection: Connection, first: Message) -> None:
        """The first node has let this one in."""
        message: Message | None = first
        connection.send(*self._waiting)
        self._here[0] = connection
        while message is not None:
            if not isinstance(message, Heartbeat):
                self._record(message)
            message = await connection.read()
        self._lose(0, f"is gone: {connection.why_lost}", False)

    def _lose(self, node: int, why: str, may_come: bool) -> None:
        super()._lose(node, why, may_come)
        self._part()
