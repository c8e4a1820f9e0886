"""How far a run is, from the files that it writes: read again and again, each byte once."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import msgspec
from msgspec import Struct, field

from launcher.report.read_run import is_running, read_conclusion, read_record
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.record import RunRecord
from model_check.errors import UsageError
from model_check.events import Metrics, Step, Telemetry, decode, decode_gpu
from model_check.utils.held import hold_unlinked
from model_check.utils.words import printable, printable_lines
from model_check.utils.worker_env import telemetry_path

_TAIL_BYTES = 4096
_RECENT = 32
"""Steps whose pace tells when the rest will be done."""


class Appended:
    """The whole lines that were added to a file since it was looked at last."""

    def __init__(self, path: Path, *, from_end: int | None = None) -> None:
        """`from_end`: only so many bytes of what is there at first. The file may come later."""
        self._path = path
        self._from_end = from_end
        self._file: BufferedReader | None = None
        self._rest = b""

    def lines(self) -> list[bytes]:
        if self._file is None and not self._opens():
            return []
        assert self._file is not None
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return whole

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opens(self) -> bool:
        with suppress(OSError), hold_unlinked(self._path.parent) as directory:
            self._file = directory.open(self._path.name)
            if self._from_end is not None:
                size = self._file.seek(0, 2)
                self._file.seek(max(0, size - self._from_end))
            return True
        return False


class WorkerProgress(Struct):
    """One worker, as it is now. None: not told (yet)."""

    facts: WorkerFacts = field(default_factory=lambda: WorkerFacts(tracer=None))
    last: Step | None = None
    metrics: Metrics | None = None
    sample: Telemetry | None = None
    last_line: str = ""
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """(nanoseconds, step)"""

    def take_event(self, line: bytes) -> None:
        event = decode(line)
        self.facts.record(event)
        match event:
            case Metrics():
                self.metrics = event
            case Step():
                self.last = event
                self.recent.append((event.t, event.step))

    def take_telemetry(self, line: bytes) -> None:
        if isinstance(event := decode_gpu(line), Telemetry):
            self.sample = event

    @property
    def step(self) -> int | None:
        return self.facts.last_step

    @property
    def step_s(self) -> float | None:
        """Seconds a step, of the latest."""
        if len(self.recent) < 2:
            return None
        (since_ns, first), (until_ns, last) = self.recent[0], self.recent[-1]
        return (until_ns - since_ns) / 1e9 / (last - first) if last > first else None


class RunProgress:
    """One run directory. `look` reads what is new."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError where no run is."""
        self.directory = directory
        self.record: RunRecord = read_record(directory)
        self.workers = {name: WorkerProgress() for name in self.record.workers}
        self.verdict: str | None = None
        """Of a run that is over, with its summary and its exit code, or why it has none."""
        self._followed = {name: list(self._follow(name)) for name in self.workers}
        self._logs = {name: self._log(name) for name in self.workers}

    def look(self) -> bool:
        """Whether anything is new."""
        # Asked first: what a run that is over wrote in the end is read below.
        verdict = self._end()
        is_new = verdict != self.verdict
        for name in self.workers:
            for file, take in self._followed[name]:
                for line in file.lines():
                    is_new = True
                    with suppress(msgspec.DecodeError):
                        take(line)
            is_new = self._read_log(name) or is_new
        self.verdict = verdict
        return is_new

    def close(self) -> None:
        for files in self._followed.values():
            for file, _ in files:
                file.close()
        for log in self._logs.values():
            log.close()

    @property
    def eta_s(self) -> float | None:
        """Until the slowest worker has done its steps."""
        steps = self.record.steps
        if steps is None or self.verdict is not None:
            return None
        told = [(w.step, w.step_s) for w in self.workers.values()]
        left = [(steps - 1 - at) * each for at, each in told if at is not None and each is not None]
        return max(left) if len(left) == len(self.workers) else None

    def _follow(self, name: str) -> Iterator[tuple[Appended, Callable[[bytes], None]]]:
        worker = self.workers[name]
        yield Appended(self.directory / f"{name.lower()}.events.jsonl"), worker.take_event
        yield Appended(telemetry_path(self.directory, name)), worker.take_telemetry

    def _log(self, name: str) -> Appended:
        return Appended(self.directory / f"{name.lower()}.log", from_end=_TAIL_BYTES)

    def _read_log(self, name: str) -> bool:
        lines = [line for line in self._logs[name].lines() if line.strip()]
        if lines:
            self.workers[name].last_line = printable(lines[-1].decode(errors="replace"))
        return bool(lines)

    def _end(self) -> str | None:
        """None: it goes on."""
        if (ended := read_conclusion(self.directory)) is not None:
            return printable_lines(ended.line)
        with suppress(UsageError):
            self.record = read_record(self.directory)
        return None if is_running(self.record) else "its launcher did not live to see the end"
