"""The link between the launchers of one job: a thread that keeps one log of messages, in one order.

The first node's launcher (`leader`) listens; whatever a node says goes to it, gets its place in the
log there, and from there to all nodes. So all of them know which of two failures was told first,
and no clock is compared with another machine's. Each side sends heartbeats, and a side that is
silent for too long is lost.
"""

import asyncio
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from launcher.nodes.messages import (
    Failure,
    Heartbeat,
    Join,
    Leave,
    Message,
    WorkersExited,
    decode,
    encode,
)
from model_check.errors import EXIT_INTERNAL, EXIT_PEER_LOST
from model_check.utils.threads import start_without_signals
from model_check.utils.words import first_line

BEAT_S = 1.0
ANSWER_S = 5.0
"""A launcher answers so soon after it was connected; another program may not."""
RETRY_S = 0.2
_PAUSE_S = 1.0
"""Overslept by more than this, we were stopped, and silence proves nothing."""
_FLUSH_S = 2.0


class Connection:
    """A message a line, both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.local_address: str = writer.get_extra_info("sockname")[0]
        self.heard_at = time.monotonic()
        self.line = b""
        """The last one that was read."""
        self.why_lost = "its launcher ended without a word"

    def send(self, *messages: Message) -> None:
        self._writer.writelines(map(encode, messages))

    async def read(self) -> Message | None:
        """The next one; None: there is no more, or it is none of ours."""
        try:
            self.line = await self._reader.readline()
            message = decode(self.line) if self.line.endswith(b"\n") else None
        except ValueError:
            self.why_lost = "it said what no launcher says"
            return None
        except OSError:
            return None
        self.heard_at = time.monotonic()
        return message

    def hang_up(self) -> None:
        """What was sent is on its way; `read` ends."""
        self._writer.close()

    async def close(self) -> None:
        self.hang_up()
        with suppress(OSError):
            await self._writer.wait_closed()


class Link(ABC):
    """This launcher's end. `start` it, then read `log`; methods are for the main thread."""

    def __init__(self, join: Join, names: Sequence[str], address: str, port: int) -> None:
        """`join`: the first message. `names`: of all nodes."""
        self.join, self.names = join, names
        self.address, self.port = address, port
        """Of the first node; it may be known to the others by another address."""
        self.log: list[Message] = []
        """What all nodes said, in the order of the first node's launcher. It only grows."""
        self.fault: str | None = None
        """The traceback of a fault of ours that has ended the link."""
        self.is_cut_off = False
        """Nothing will come from the other nodes any more."""
        self.limit_s = 0.0
        """Longest silence of a node, once it has come."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the log has grown."""
        self._here: dict[int, Connection] = {}
        """The nodes that this one is connected with."""
        self._changed = threading.Condition()
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._work, name="nodes", daemon=True)

    def start(self, limit_s: float, until: float) -> None:
        """`until`: when all must have come, monotonic seconds. Raises ConfigError for a port that
        somebody else has."""
        self.limit_s, self._until = limit_s, until
        self._open()
        self._loop = asyncio.new_event_loop()
        start_without_signals(self._thread)

    def say(self, message: Message) -> None:
        """To all nodes; it is in the log when it has its place there."""
        with suppress(RuntimeError):  # the link has ended
            self._loop.call_soon_threadsafe(self._pass_on, message)

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
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_FLUSH_S + BEAT_S)
        if not self._thread.is_alive() and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- the thread

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    async def _serve(self) -> None:
        """Connect, and hear the others."""

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Ours, on its way to the log."""

    def _work(self) -> None:
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._begin(self._serve())
        self._begin(self._beat())
        await self._closing.wait()
        for task in self._tasks:
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), _FLUSH_S)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._break(error)

    def _pass_on(self, message: Message) -> None:
        try:
            self._send(message)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """A fault of ours ends the job on all nodes: it is told here, and, as far as a connection
        stands, there."""
        self.fault = "".join(traceback.format_exception(error))
        why = (
            "a fault of Model Check itself in the link between the launchers: "
            f"{type(error).__name__}: {first_line(error)}"
        )
        failure = self._cut_off(why, EXIT_INTERNAL)
        for each in self._here.values():
            each.send(failure)
        self._closing.set()

    def _cut_off(self, why: str, exit_code: int) -> Failure:
        """This launcher may not go on with the others."""
        failure = Failure(self.join.node, None, None, why, exit_code, is_own=False)
        self._record(failure)
        self._part()
        return failure

    def _part(self) -> None:
        """When the log tells why."""
        with self._changed:
            self.is_cut_off = True
            self._changed.notify_all()

    async def _beat(self) -> None:
        beaten = 0.0
        while True:
            slept_from = time.monotonic()
            await asyncio.sleep(RETRY_S)
            now = time.monotonic()
            if now - slept_from > RETRY_S + _PAUSE_S:
                for each in self._here.values():
                    each.heard_at += now - slept_from
            if now - beaten >= BEAT_S:
                beaten = now
                for each in self._here.values():
                    each.send(Heartbeat())
            self._check(now)

    def _check(self, now: float) -> None:
        """Who is not heard any more."""
        for node, connection in [*self._here.items()]:
            if (silent_s := now - connection.heard_at) >= self.limit_s:
                self._lose(node, f"not heard for {silent_s:.0f} s", True)

    def _order(self, message: Message) -> None:
        """Give it its place in the log, here and on the nodes that have theirs from this one."""
        self._record(message)
        for each in self._here.values():
            each.send(message)

    def _record(self, message: Message) -> None:
        with self._changed:
            self.log.append(message)
            self._changed.notify_all()
        os.eventfd_write(self.fd, 1)

    def _lose(self, node: int, why: str, may_come: bool) -> None:
        """It is not heard any more. One whose workers have exited may go. `may_come`: it may still
        run, and try again."""
        if (connection := self._here.pop(node, None)) is not None:
            connection.hang_up()
        about = [m for m in self.log if isinstance(m, WorkersExited | Leave) and m.node == node]
        if not about:
            cause = f"node {self.names[node]} {why}"
            self._order(Failure(node, None, None, cause, EXIT_PEER_LOST, is_own=False))
        if not any(isinstance(message, Leave) for message in about):
            self._order(Leave(node, may_come))
