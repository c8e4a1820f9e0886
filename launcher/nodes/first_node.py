"""The first node's end of the link: it listens, lets the launchers of its job in, and gives what is
said its place in the log."""

import errno
import ipaddress
import selectors
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from launcher.nodes.comparison import Comparison
from launcher.nodes.link import ANSWER_S, Link
from launcher.nodes.messages import (
    Beat,
    Bits,
    Broken,
    Failure,
    Gone,
    Greeting,
    Hello,
    Message,
    Over,
    Refusal,
    Refused,
    greeting,
    two_versions,
)
from launcher.nodes.wire import Wire
from model_check.errors import EXIT_USAGE, ConfigError

MAX_STRANGERS = 64
"""Connections that have not said who they are, beside one a node: of more, the oldest goes."""
_MOST_WORDS = 16
"""Of one node, beside one for each of its workers: far more than a launcher has to say."""


class FirstNode(Link):
    """That of the first node: it listens, and numbers what is said."""

    def _begin(self) -> None:
        self.comparison = Comparison()
        self._here: dict[int, Wire] = {}
        self._differs = False
        self._words: Counter[int] = Counter()
        """How many messages of each node are in the log."""
        self._strangers: list[Wire] = []
        self._listener = _listening(self.address, self.port)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._take_greeting(self.hello)

    @property
    def _wires(self) -> Sequence[Wire]:
        return [*self._here.values()]

    def _send(self, message: Message) -> None:
        if isinstance(message, Bits):
            self._compare(message)
            return
        self._record(message)
        for wire in self._wires:
            wire.send(message)

    def _serve(self, key: selectors.SelectorKey, now: float) -> None:
        if key.fileobj is self._listener:
            self._accept(now)
            return
        wire: Wire = key.data
        if wire.node is None and wire not in self._strangers:
            return  # it had to make place in this turn
        messages = wire.read(now)
        if messages is None:
            self._lose(wire, wire.why_lost)
            return
        for message in messages:
            if wire.node is None:
                if not self._admits(wire, message):
                    return
            elif not self._may_say(wire.node, message):
                self._lose(wire, "it said what no launcher says")
                return
            elif isinstance(message, Bits):
                self._compare(message)
            elif not isinstance(message, Beat):
                self._send(message)

    def _may_say(self, node: int, message: Message) -> bool:
        """A node speaks for itself alone, and not for ever: the log is kept in memory."""
        if isinstance(message, Beat):
            return True
        if isinstance(message, Hello | Refused | Refusal | Gone | Broken) or message.node != node:
            return False
        if isinstance(message, Bits):
            return True
        self._words[node] += 1
        return self._words[node] <= _MOST_WORDS + len(self._hellos[node].workers)

    def _compare(self, bits: Bits) -> None:
        """Of all messages these alone are for this node only."""
        failure = self.comparison.take(bits, self._hellos)
        if failure is not None and not self._differs:
            self._differs = True
            self._send(failure)

    def _accept(self, now: float) -> None:
        with suppress(OSError):
            wire = Wire(self._listener.accept()[0], now)
            self._strangers.append(wire)
            self._selector.register(wire.socket, selectors.EVENT_READ, wire)
        while len(self._strangers) > MAX_STRANGERS + len(self.names):
            self._drop(self._strangers[0])

    def _admits(self, wire: Wire, message: Message) -> bool:
        """Whether it is a node of this job, which is here from now on; others are dropped."""
        if not isinstance(message, Hello | Refused) or not self._may_come(wire, message):
            self._drop(wire)
            return False
        if isinstance(message, Refused):
            self._take_greeting(message)
            wire.send(*self.log)  # it has been heard
            self._drop(wire)
            return False
        wire.send(*self.log)
        self._strangers.remove(wire)
        wire.node, self._here[message.node] = message.node, wire
        self.local_address = wire.socket.getsockname()[0]
        self._send(message)
        return True

    def _take_greeting(self, hello: Hello | Refused) -> None:
        """A node that does not come has ended the job, and is not waited for."""
        if isinstance(hello, Hello):
            self._send(hello)
            return
        failure = Failure(
            node=hello.node, worker=None, step=None, cause=hello.why, exit_code=hello.exit_code
        )
        self._send(failure)
        self._send(Over(hello.node))

    def _may_come(self, wire: Wire, hello: Hello | Refused | Greeting) -> bool:
        """A node of this job that may not come ends it: it will not come again."""
        if (why := self._objection(hello)) is not None:
            wire.send(Refusal(why))
            return False
        if isinstance(hello, Refused) or self._is_of_this_version(hello):
            return True
        why = two_versions(self.hello, hello)
        wire.send(Refusal(why, is_final=True))
        self._take_greeting(
            Refused(hello.node, hello.job, hello.name, why, EXIT_USAGE, hello.version)
        )
        return False

    def _is_of_this_version(self, hello: Hello | Greeting) -> bool:
        return isinstance(hello, Hello) and hello.version == self.hello.version

    def _objection(self, hello: Hello | Refused | Greeting) -> str | None:
        if hello.job != self.hello.job:
            return f"the nodes of job {self.hello.job} meet there, this is {hello.job}"
        if not 0 < hello.node < len(self.names) or hello.name != self.names[hello.node]:
            return f"node {hello.node} ({hello.name}) is none of this job"
        if hello.node in self._hellos or self._is_gone(hello.node):
            return f"node {hello.name} has come already"
        return None

    def _turn(self, now: float) -> None:
        for stranger in [s for s in self._strangers if now - s.since > ANSWER_S]:
            self._drop(stranger)
        for node, wire in [*self._here.items()]:
            if (gone := self._silent(node, now, wire)) is not None:
                self._leave(node, gone)
        if now >= self._until:
            for node in {*range(1, len(self.names))} - self._hellos.keys():
                if not self._is_gone(node):
                    self._send(Gone(node, f"node {self.names[node]} did not come"))

    @property
    def _hellos(self) -> dict[int, Hello]:
        """Of those that have come."""
        return {m.node: m for m in self.log if isinstance(m, Hello)}

    def _lose(self, wire: Wire, why: str) -> None:
        if wire.node is None:
            if wire in self._strangers and (hello := greeting(wire.garbled)) is not None:
                self._may_come(wire, hello)  # it is not: we cannot read all that it says
            self._drop(wire)
            return
        why = f"node {self.names[wire.node]} is gone: {why}"
        gone = Gone(wire.node, why, has_ended=True)
        self._leave(wire.node, gone)

    def _leave(self, node: int, gone: Gone) -> None:
        wire = self._here.pop(node)
        self._selector.unregister(wire.socket)
        wire.close()
        if not self._is_gone(node):
            self._send(gone)

    def _drop(self, wire: Wire) -> None:
        self._strangers.remove(wire)
        self._selector.unregister(wire.socket)
        wire.close()

    def _hang_up_all(self) -> None:
        super()._hang_up_all()
        for stranger in self._strangers:
            stranger.close()
        self._listener.close()


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
            return socket.create_server((place, port), family=family, backlog=1024)
        except OSError as failure:
            error = error or failure
            if failure.errno != errno.EADDRNOTAVAIL:
                break
    raise ConfigError(
        f"port {port} of {address}: the launchers of this job's nodes cannot meet there: "
        f"{error.strerror if error else ''}; set MASTER_PORT to a free port"
    )
