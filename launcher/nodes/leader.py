"""The first node's end of the link: it listens, lets the launchers of its job in, and gives what is
said its place in the log."""

import asyncio
import errno
import ipaddress
import socket
from collections import Counter
from contextlib import suppress

from msgspec.structs import replace

from launcher.nodes.link import ANSWER_S, Connection, Link
from launcher.nodes.messages import (
    MAX_LINE_BYTES,
    Bits,
    Failure,
    Greeting,
    Heartbeat,
    Join,
    JoinRejected,
    Leave,
    Message,
    greeting,
    two_versions,
)
from launcher.verdict.agreement import compare
from launcher.verdict.disagreement import Disagreement
from model_check.errors import EXIT_DISAGREEMENT, EXIT_UNNAMED, EXIT_USAGE, ConfigError
from model_check.events import Step
from model_check.utils.words import listed

MAX_STRANGERS = 64
"""Connections that have not said who they are, beside one a node: of more, the oldest goes."""
_BACKLOG = 1024
_MOST_WORDS = 16
"""Of one node, beside one for each of its workers: far more than a launcher has to say."""


class Leader(Link):
    def _open(self) -> None:
        self.num_agreed = 0
        """Steps at which the nodes of a kind had the same bits."""
        self._steps: dict[tuple[str, int], dict[str, Step]] = {}
        """Those that not all nodes of a kind have told."""
        self._words: Counter[int] = Counter()
        """How many messages of each node are in the log."""
        self._strangers: list[Connection] = []
        self._listener = _listening(self.address, self.port)
        self._admit(self.join)

    async def _serve(self) -> None:
        def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._begin(self._meet(Connection(reader, writer)))

        server = await asyncio.start_server(
            meet, sock=self._listener, limit=MAX_LINE_BYTES, backlog=_BACKLOG
        )
        try:
            await self._closing.wait()
        finally:
            server.close()

    async def _meet(self, connection: Connection) -> None:
        self._strangers.append(connection)
        while len(self._strangers) > MAX_STRANGERS + len(self.names):
            self._strangers.pop(0).hang_up()
        try:
            with suppress(TimeoutError):
                message = await asyncio.wait_for(connection.read(), ANSWER_S)
                if connection in self._strangers:  # else it had to make place
                    self._strangers.remove(connection)
                    await self._answer(connection, message or greeting(connection.line))
        finally:
            await connection.close()

    async def _answer(self, connection: Connection, said: Message | Greeting | None) -> None:
        if isinstance(said, Join | Greeting) and self._may_come(connection, said):
            await self._hear(said.node, connection)

    def _may_come(self, connection: Connection, join: Join | Greeting) -> bool:
        """Whether it is a node of this job, which is here from now on. One that may not come ends
        the job: it will not come again."""
        if (why := self._objection(join)) is not None:
            connection.send(JoinRejected(why))
            return False
        if not isinstance(join, Join) or not (join.failure or join.version == self.join.version):
            why = two_versions(self.join, join)
            connection.send(JoinRejected(why, is_final=True))
            failure = Failure(join.node, None, None, why, EXIT_USAGE)
            join = Join(join.node, join.job, join.name, failure=failure)
            self._admit(join)
            return False
        self.address = connection.local_address
        self._admit(join)
        connection.send(*self.log)
        if join.failure is None:
            self._here[join.node] = connection
        return join.failure is None

    def _objection(self, join: Join | Greeting) -> str | None:
        if join.job != self.join.job:
            return f"the nodes of job {self.join.job} meet there, this is {join.job}"
        if not 0 < join.node < len(self.names) or join.name != self.names[join.node]:
            return f"node {join.node} ({join.name}) is none of this job"
        if any(isinstance(m, Join | Leave) and m.node == join.node for m in self.log):
            return f"node {join.name} has come already"
        return None

    def _admit(self, join: Join) -> None:
        """A node that does not come has ended the job, and is not waited for."""
        if join.failure is None:
            self._send(join)
        else:
            self._send(replace(join.failure, node=join.node, is_own=True))
            self._send(Leave(join.node))

    async def _hear(self, node: int, connection: Connection) -> None:
        while (message := await connection.read()) is not None:
            if not self._may_say(node, message):
                connection.why_lost = "it said what no launcher says"
                break
            if not isinstance(message, Heartbeat):
                self._send(message)
        self._lose(node, f"is gone: {connection.why_lost}", False)

    def _may_say(self, node: int, message: Message) -> bool:
        """A node speaks for itself alone, and not for ever: the log is kept in memory."""
        if isinstance(message, Heartbeat):
            return True
        if isinstance(message, Join | JoinRejected) or message.node != node:
            return False
        if isinstance(message, Bits):
            return True
        self._words[node] += 1
        return self._words[node] <= _MOST_WORDS + len(self._joined[node].workers)

    def _send(self, message: Message) -> None:
        if isinstance(message, Bits):  # of all messages these alone are for this node only
            self._compare(message)
        else:
            self._order(message)

    def _compare(self, bits: Bits) -> None:
        """Nodes of one kind must agree; each has one voice, that of its ranks. Whole steps alone,
        so that many nodes cost little."""
        kind = self._joined[bits.node].kind
        equals = [join.name for join in self._joined.values() if join.kind == kind]
        if kind is None or len(equals) < 2:
            return
        told = self._steps.setdefault((kind, bits.step.step), {})
        told[self.names[bits.node]] = bits.step
        if len(told) < len(equals):
            return
        del self._steps[kind, bits.step.step]
        if (found := compare(told)) is not None:
            self._send(self._failure(found))
        else:
            self.num_agreed += 1

    def _failure(self, found: Disagreement) -> Failure:
        """Named by strict majority of the nodes, or nobody."""
        if not found.odd:
            names = listed([*found.bits])
            cause = f"{names} differ in their {found.place} at step {found.step}"
            cause += ", and none is in the majority"
            node = self.names.index(next(iter(found.bits)))
            return Failure(node, None, found.step, cause, EXIT_UNNAMED, is_own=False)
        node = self.names.index(found.odd[0])
        workers = self._joined[node].workers
        worker = workers[0] if len(found.odd) == len(workers) == 1 else None
        names = "" if worker else f"{listed(found.odd)}: "
        num_others = len(found.bits) - len(found.odd)
        cause = f"{names}other {found.place} than {num_others} other nodes at step {found.step}"
        return Failure(node, worker, found.step, cause, EXIT_DISAGREEMENT, is_own=False)

    def _check(self, now: float) -> None:
        super()._check(now)
        if now >= self._until:
            for node in {*range(len(self.names))} - self._joined.keys():
                self._lose(node, "did not come", True)

    @property
    def _joined(self) -> dict[int, Join]:
        return {m.node: m for m in self.log if isinstance(m, Join)}


def places_to_listen(address: str, resolved: str) -> list[str]:
    """At that address, if it is one of this machine; else at all of them. A name that means
    loopback to its own machine alone (Debian: 127.0.1.1) means another address elsewhere."""
    everywhere = "::" if ":" in resolved else ""
    is_loopback = ipaddress.ip_address(resolved.partition("%")[0]).is_loopback
    is_meant = address in (resolved, "localhost")
    return [everywhere] if is_loopback and not is_meant else [address, everywhere]


def _listening(address: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as failure:
        raise ConfigError(
            f"{address}: this machine cannot resolve where the launchers of the job meet "
            f"({failure.strerror}); set MASTER_ADDR to an address of the first node"
        ) from failure
    error: OSError | None = None
    for place in places_to_listen(address, str(found[0])):
        try:
            return socket.create_server((place, port), family=family, backlog=_BACKLOG)
        except OSError as failure:
            error = error or failure
            if failure.errno != errno.EADDRNOTAVAIL:
                break
    raise ConfigError(
        f"port {port} of {address}: the launchers of this job's nodes cannot meet there: "
        f"{error.strerror if error else ''}; set MASTER_PORT to a free port"
    )
