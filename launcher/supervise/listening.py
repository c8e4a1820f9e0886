"""All that is heard of the workers: which pipes there are, when they are read, and how far.

What they carry is for `streams`, what follows from it for the supervisor.
"""

from collections.abc import Callable
from functools import partial

from launcher.output.append_file import AppendFile
from launcher.output.printer import Printer
from launcher.output.streams import Events, Output, Report, Stream
from launcher.supervise.loop import Loop, Urgency
from launcher.supervise.pace import Pace
from launcher.supervise.worker import Spawned, Worker
from model_check.events import Event

_NEVER = float("inf")
_MAX_READS = 64
"""A last look into a stream reads no more often: somebody out of reach may still be writing."""


class Ears:
    """The streams of one run, read as the loop finds them ready."""

    def __init__(self, loop: Loop, printer: Printer, woke_ns: Callable[[], int]) -> None:
        """`woke_ns`: when the loop woke up last, CLOCK_MONOTONIC."""
        self._loop = loop
        self._printer = printer
        self._woke_ns = woke_ns
        self._pace = Pace()
        self._streams: dict[str, list[Stream]] = {}
        self._events: list[Stream] = []
        self._outputs: list[Output] = []
        self._rest_until = 0.0
        self._frames_at = _NEVER

    def listen(self, worker: Worker, spawned: Spawned, hear: Callable[[Event], None]) -> None:
        """To all that this worker says, until it ends."""
        spec, say = worker.spec, self._printer.say
        streams = self._streams[spec.name] = []
        streams.append(self._add(worker, spawned.report_fd, Report(partial(_runs, worker))))
        if spawned.events_fd is not None and spec.events_path is not None:
            complain = partial(self._complain, spec.name)
            events = Events(AppendFile(spec.events_path, say), hear, complain)
            self._events.append(self._add(worker, spawned.events_fd, events))
            streams.append(self._events[-1])
        prefix = spec.prefix or f"[{spec.name}] "
        output = Output(AppendFile(spec.log_path, say), self._printer, prefix, worker.remember)
        self._outputs.append(output)
        streams.append(self._add(worker, spawned.output_fd, output))

    def is_resting(self, now: float) -> bool:
        """Whether output gathers meanwhile."""
        return now < self._rest_until

    def due(self, now: float) -> float:
        """When there is something to do though nothing was said: a rest ends, a bar is drawn."""
        rested_at = self._rest_until if self.is_resting(now) else _NEVER
        return min(rested_at, self._frames_at)

    def end_turn(self) -> None:
        """Everything that was ready has been heard."""
        now = self._now
        self._rest_until = max(self._rest_until, now + self._pace.rest_s(now))
        if now < self._frames_at:
            return
        for output in self._outputs:
            output.tick(now)
        frames = (due for output in self._outputs if (due := output.next_due) is not None)
        self._frames_at = min(frames, default=_NEVER)

    def hear_events(self) -> None:
        """All that has been said to this moment."""
        for stream in self._events:
            stream.pump(self._now, _MAX_READS)

    def hear_last_words(self, worker: Worker) -> None:
        for stream in self._streams.get(worker.spec.name, ()):
            self._pump(stream, _MAX_READS)

    def close(self) -> None:
        """Hear what is left, and no more."""
        for streams in self._streams.values():
            for stream in streams:
                self._pump(stream, _MAX_READS)
                self._close(stream)

    @property
    def _now(self) -> float:
        return self._woke_ns() / 1e9

    def _add(self, worker: Worker, fd: int, sink: Report | Events | Output) -> Stream:
        stream = Stream(fd, sink)
        if isinstance(sink, Output):
            self._loop.watch(fd, partial(self._read_output, worker, stream), Urgency.OUTPUT)
        else:
            self._loop.watch(fd, partial(self._read, worker, stream), Urgency.EVENT)
        return stream

    def _read(self, worker: Worker, stream: Stream) -> None:
        worker.last_heard_ns = self._woke_ns()
        self._pump(stream, 1)

    def _read_output(self, worker: Worker, stream: Stream) -> None:
        self._read(worker, stream)
        self._pace.took(stream.last_read_bytes)

    def _pump(self, stream: Stream, num_reads: int) -> None:
        self._frames_at = self._now  # it may be a bar that is drawn
        if not stream.pump(self._now, num_reads):
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        if stream.fd is not None:
            self._loop.unwatch(stream.fd)
            stream.close(self._now)

    def _complain(self, name: str, what: str) -> None:
        self._printer.say(f"{name}: {what}")


def _runs(worker: Worker, why_not: bytes) -> None:
    """The trampoline's report has ended."""
    if why_not:
        worker.spawn_error = why_not.decode(errors="replace")
    else:
        worker.command_runs()
