"""How far a run is, from the files that it writes: read again and again, each byte once."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from launcher import run_dir
from launcher.report.comparison import begun, read_comparison
from launcher.report.read_run import is_running, read_conclusion, read_record
from launcher.telemetry.health import Record
from launcher.verdict.agreement import Agreement
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.record import RunRecord
from model_check.errors import UsageError
from model_check.events import Done, Event, Metrics, Phase, Step, Telemetry, decode, decode_gpu
from model_check.utils.held import hold_unlinked
from model_check.utils.words import printable, printable_lines
from model_check.utils.worker_env import telemetry_path

T = TypeVar("T")
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
    gpu: Record = field(default_factory=Record)
    last_line: str = ""
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """(nanoseconds, step)"""
    heard_ns: int = 0
    """When it said something last, CLOCK_MONOTONIC."""

    def take_event(self, event: Event) -> None:
        self.facts.record(event)
        self.heard_ns = event.t
        match event:
            case Metrics():
                self.metrics = event
            case Step():
                self.last = event
                self.recent.append((event.t, event.step))

    @property
    def sample(self) -> Telemetry | None:
        return self.gpu.sample

    def is_ahead_of(self, other: "WorkerProgress") -> bool:
        return (self.step or 0) > (other.step or 0)

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
        self.differs: dict[str, int] = {}
        """Worker -> the first step at which it differs from the others of its group."""
        self._agreement = Agreement(self.record.groups)
        self._events = {
            name: Appended(directory / f"{name.lower()}.events.jsonl") for name in self.workers
        }
        self._telemetry = {name: Appended(telemetry_path(directory, name)) for name in self.workers}
        self._logs = {name: self._log(name) for name in self.workers}

    def look(self) -> None:
        # Asked first: what a run that is over wrote in the end is read below.
        verdict = self._end()
        for name, worker in self.workers.items():
            for event in _decoded(self._events[name], decode):
                worker.take_event(event)
                self._compare(name, event)
            for told in _decoded(self._telemetry[name], decode_gpu):
                worker.gpu.record(told)
            self._read_log(name)
        self.verdict = verdict

    @property
    def equal_steps(self) -> dict[str, int]:
        """Worker -> the steps at which it had the bits of all its equals."""
        return self._agreement.agreed_steps

    def close(self) -> None:
        for file in (*self._events.values(), *self._telemetry.values(), *self._logs.values()):
            file.close()

    def _compare(self, worker: str, event: Event) -> None:
        """What exactly differs, the run itself tells."""
        if self.record.not_compared is not None:
            return
        found = None
        match event:
            case Phase(name="build" | "train"):
                self._agreement.identify(worker, event.detail)
            case Step():
                found = self._agreement.record(worker, event)
            case Done():
                found = self._agreement.leave(worker)
        if found is not None:
            apart = found.odd or [*found.bits]
            self.differs |= {name: found.step for name in apart if name not in self.differs}
            for name in apart:
                self._agreement.exclude(name)

    @property
    def eta_s(self) -> float | None:
        """Until the slowest worker has done its steps."""
        steps = self.record.steps
        if steps is None or self.verdict is not None:
            return None
        told = [(w.step, w.step_s) for w in self.workers.values()]
        left = [(steps - 1 - at) * each for at, each in told if at is not None and each is not None]
        return max(left) if len(left) == len(self.workers) else None

    def _log(self, name: str) -> Appended:
        return Appended(self.directory / f"{name.lower()}.log", from_end=_TAIL_BYTES)

    def _read_log(self, name: str) -> None:
        lines = [line for line in self._logs[name].lines() if line.strip()]
        if lines:
            self.workers[name].last_line = printable(lines[-1].decode(errors="replace"))

    def _end(self) -> str | None:
        """None: it goes on."""
        if (ended := read_conclusion(self.directory)) is not None:
            return printable_lines(ended.line)
        with suppress(UsageError):
            self.record = read_record(self.directory)
        return None if is_running(self.record) else "its launcher did not live to see the end"


class Watched:
    """A run: of several rounds the newest, of a job that was restarted what went on last."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError where no run is."""
        self._directory = directory
        self.run = RunProgress(run_dir.newest_part(directory))

    def look(self) -> None:
        newest = run_dir.newest_part(self._directory)
        if newest != self.run.directory and (newest / "run.json").exists():
            self.close()
            self.run = RunProgress(newest)
        self.run.look()

    @property
    def is_over(self) -> bool:
        if self.run.verdict is None:
            return False
        if run_dir.rounds_in(self._directory) and read_conclusion(self._directory):
            return True
        record = self.run.record
        may_restart = bool((record.asked_for or {}).get("launch.max_restarts"))
        is_part = self.run.directory != self._directory
        return not ((is_part or may_restart) and is_running(record))

    @property
    def runs(self) -> list[RunProgress]:
        return [self.run]

    def close(self) -> None:
        self.run.close()


class WatchedComparison:
    """A comparison: the trainings that have begun."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError where its record is damaged."""
        self._directory, self._record = directory, read_comparison(directory)
        self._trials: dict[Path, RunProgress] = {}

    @property
    def runs(self) -> list[RunProgress]:
        return list(self._trials.values())

    def look(self) -> None:
        for path in begun(self._record, self._directory):
            if path not in self._trials:
                self._trials[path] = RunProgress(path)
        for run in self.runs:
            run.look()

    @property
    def is_over(self) -> bool:
        return not is_running(self._record)

    def close(self) -> None:
        for run in self.runs:
            run.close()


def watched(directory: Path) -> Watched | WatchedComparison:
    """Raises UsageError where no run is."""
    is_comparison = run_dir.is_comparison(directory)
    return WatchedComparison(directory) if is_comparison else Watched(directory)


def _decoded(file: Appended, decode: Callable[[bytes], T]) -> Iterator[T]:
    """Without lines that are none of ours."""
    for line in file.lines():
        with suppress(msgspec.DecodeError):
            yield decode(line)
