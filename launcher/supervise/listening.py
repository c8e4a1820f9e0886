"""Read all that the workers say: which pipes there are, when they are read, and how far; and tell
them what they are to do.

What they carry is for `streams`, what follows from it for the supervisor.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from launcher.output.append_file import AppendFile
from launcher.output.printer import Printer
from launcher.output.streams import Ended, Events, Feed, Output, Stream
from launcher.supervise.loop import Loop, Urgency
from launcher.supervise.outbox import Outbox
from launcher.supervise.worker import Spawned, Worker
from model_check.events import Command, Event

_MANY_READS = 20
_MANY_READS_S = 0.1
"""To read each line as it comes costs a wake-up a line. Nobody follows 20 lines in 0.1 s with their
eyes: they may gather."""
_MIN_PAUSE_S = 0.002
"""A shorter pause gathers too little to be worth it."""
_MAX_PAUSE_S = 0.05
_GATHER_BYTES = 1 << 14
"""So much may gather in the busiest pipe, a quarter of what it holds: its worker must not wait."""


class Listener:
    """The streams of one run, read as the loop finds them ready."""

    def __init__(self, loop: Loop, printer: Printer, woke: Callable[[], float]) -> None:
        """`woke`: when the loop woke up last, monotonic seconds."""
        self._loop = loop
        self._printer = printer
        self._woke = woke
        self._streams: defaultdict[Worker, list[Stream]] = defaultdict(list)
        self._events: list[Stream] = []
        self._outboxes: defaultdict[str, Outbox] = defaultdict(Outbox)
        self._unsent: set[str] = set()
        # Since then: reads of output, and the bytes of each pipe.
        self._counted_from, self._num_reads = woke(), 0
        self._num_bytes: Counter[Stream] = Counter()

    def listen(self, worker: Worker, spawned: Spawned, hear: Callable[[Event], None]) -> None:
        """Hear all that this worker says, until it ends."""
        spec, say = worker.spec, self._printer.say
        report = bytearray()
        self._add(worker, spawned.report_fd, report.extend, partial(worker.take_report, report))
        if spawned.events_fd is not None and spec.events_path is not None:
            file = AppendFile(spec.events_path, say)
            events = Events(file, hear, lambda what: say(f"{spec.name}: {what}"))
            stream = self._add(worker, spawned.events_fd, events.feed, events.close)
            self._events.append(stream)
            self._outboxes[worker.name].stream = stream
        log = AppendFile(spec.log_path, say)
        prefix = f"[{spec.name}] " if spec.prefix is None else spec.prefix
        output = Output(log, self._printer, prefix, worker.remember)
        self._add(worker, spawned.output_fd, output.feed, output.close, Urgency.OUTPUT)

    def tell(self, worker: str, command: Command) -> None:
        """With the next `send`; also a worker that is not started yet."""
        self._outboxes[worker].put(command)
        self._unsent.add(worker)

    def send(self) -> None:
        """As much as the workers take now. What is left is tried again at each wake-up: a worker
        that waits for it beats, and so wakes us."""
        self._unsent = {name for name in self._unsent if not self._outboxes[name].send()}

    def gather(self) -> None:
        """If many lines come, leave output alone until more has gathered: one read takes it."""
        if self._num_reads < _MANY_READS:
            return
        passed_s = self._woke() - self._counted_from
        pause_s = min(_MAX_PAUSE_S, passed_s * _GATHER_BYTES / max(1, *self._num_bytes.values()))
        if passed_s <= _MANY_READS_S and pause_s >= _MIN_PAUSE_S:
            self._loop.pause(pause_s)
        self._counted_from, self._num_reads = self._woke(), 0
        self._num_bytes.clear()

    def hear_events(self) -> None:
        """All that has been said to this moment."""
        for stream in self._events:
            stream.drain()

    def hear_last_words(self, worker: Worker) -> None:
        for stream in self._streams[worker]:
            if not stream.drain():
                self._close(stream)

    def close(self) -> None:
        """Hear what is left, and no more."""
        for worker, streams in self._streams.items():
            self.hear_last_words(worker)
            for stream in streams:
                self._close(stream)

    def _add(
        self, worker: Worker, fd: int, feed: Feed, ended: Ended, urgency: Urgency = Urgency.EVENT
    ) -> Stream:
        stream = Stream(fd, feed, ended)
        self._streams[worker].append(stream)
        self._loop.watch(fd, partial(self._read, worker, stream, urgency), urgency)
        return stream

    def _read(self, worker: Worker, stream: Stream, urgency: Urgency) -> None:
        worker.last_heard = self._woke()
        num_bytes = stream.read()
        if num_bytes is None:
            self._close(stream)
        elif urgency is Urgency.OUTPUT:
            self._num_reads += 1
            self._num_bytes[stream] += num_bytes

    def _close(self, stream: Stream) -> None:
        if stream.fd is not None:
            self._loop.unwatch(stream.fd)
            stream.close()
