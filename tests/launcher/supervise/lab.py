"""Real workers, small and quick, and a supervisor in this process or in one of its own."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.contain import processes
from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise.outcome import Outcome
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor
from launcher.verdict.observer import Observer
from launcher.verdict.record import Stop
from model_check.events import Event
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]
Observe = Callable[[str, Event], Stop | None]
MOMENT_S = 0.75


def python(code: str, *arguments: str) -> tuple[str, ...]:
    """A worker that runs `code`."""
    return (sys.executable, "-I", "-S", "-c", code, *arguments)


def ignore(worker: str, event: Event) -> None:
    """An observer that ends no run."""


class Hears(Observer):
    """An observer that is a function."""

    def __init__(self, hear: Observe) -> None:
        self._hear = hear

    def on_event(self, worker: str, event: Event) -> Stop | None:
        return self._hear(worker, event)


def sh(code: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", code)


def state_of(pid: int) -> str:
    """A letter, as in /proc; X: nobody has this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """Zombies are dead: only their entry is left."""
    return state_of(pid) not in "ZX"


def wait_until_stopped(*pids: int) -> None:
    for pid in pids:
        while (state := state_of(pid)) != "T":
            assert state not in "ZX"
            os.sched_yield()


def wait_until_dead(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        ready = waiter.poll(DEADLINE_S * 1000)
        os.close(pidfd)
        assert ready, f"pid {pid} still lives"


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Clock:
    """For limits: while `is_held()`, a thousandth of the time passes, so that no limit is reached
    on a machine that stalls those for whom a test waits. A stall of our own is a moment."""

    def __init__(self, is_held: Callable[[], bool]) -> None:
        self._is_held = is_held
        self.now = self._seen = time.monotonic()

    def __call__(self) -> float:
        seen = time.monotonic()
        passed_s = min(seen - self._seen, MOMENT_S)
        self.now += passed_s * (0.001 if self._is_held() else 1)
        self._seen = seen
        return self.now


def since(is_so: Callable[[], bool]) -> Clock:
    """A clock that is held until it is so for the first time."""
    seen: list[bool] = []

    def is_held() -> bool:
        if not seen and is_so():
            seen.append(True)
        return not seen

    return Clock(is_held)


@dataclass
class Lab:
    """A run directory and what to run in it."""

    dir: Path
    printers: list[Printer] = field(default_factory=list)

    def spec(self, name: str, argv: Sequence[str], events: bool = False) -> WorkerSpec:
        stem = self.dir / name.lower()
        return WorkerSpec(
            name=name,
            argv=tuple(argv),
            env={"PATH": os.environ["PATH"], "LAB": str(self.dir), "PYTHONPATH": str(ROOT)},
            log_path=stem.with_suffix(".log"),
            events_path=stem.with_suffix(".events.jsonl") if events else None,
            stacks_path=stem.with_suffix(".stacks.txt"),
        )

    def specs(self, *commands: Sequence[str], events: bool = False) -> list[WorkerSpec]:
        """Workers W0, W1, ..."""
        return [self.spec(f"W{i}", argv, events) for i, argv in enumerate(commands)]

    def run(
        self,
        *commands: Sequence[str],
        events: bool = False,
        grace_s: float = 30.0,
        silence_s: float = 0.0,
        observe: Observe | Observer = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> Outcome:
        specs = self.specs(*commands, events=events)
        return self.supervise(specs, grace_s, silence_s, observe, clock)

    def supervise(
        self,
        specs: Sequence[WorkerSpec],
        grace_s: float = 30.0,
        silence_s: float = 0.0,
        observe: Observe | Observer = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> Outcome:
        """In this process; what the terminal would show is in `shown`."""
        fd = os.open(self.dir / "terminal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        printer = Printer(fd, self.dir / "launcher.log")
        try:
            limits = Limits(grace_s, silence_s)
            observer = observe if isinstance(observe, Observer) else Hears(observe)
            return Supervisor(specs, limits, printer, observer, clock=clock).run()
        finally:
            assert printer.close(60)
            os.close(fd)

    @property
    def shown(self) -> list[str]:
        return (self.dir / "terminal").read_text().splitlines()

    def log(self, name: str) -> bytes:
        return (self.dir / f"{name}.log").read_bytes()

    def text(self, name: str) -> str:
        """Of a file that may not be there yet."""
        path = self.dir / name
        return path.read_text() if path.exists() else ""

    def pids(self) -> dict[str, int]:
        """Every `NAME.pid` that a worker or its child has left."""
        texts = {path.stem: path.read_text() for path in self.dir.glob("*.pid")}
        return {name: int(text) for name, text in texts.items() if text.endswith("\n")}


@dataclass
class OwnProcess:
    """A supervisor in a process of its own, which a test may signal or kill."""

    lab: Lab
    process: "subprocess.Popen[bytes]"

    def wait_for(self, text: str) -> str:
        """Read the terminal until a line holds `text`."""
        assert self.process.stdout is not None
        seen = b""
        for line in self.process.stdout:
            seen += line
            if text.encode() in line:
                return line.decode()
        raise AssertionError(f"{text!r} never came; the terminal showed {seen.decode()}")

    def wait(self) -> int:
        """Its exit code, once it has ended; the terminal is read to its end."""
        if self.process.stdout is not None:
            self.process.stdout.read()
        return self.process.wait(DEADLINE_S)

    @property
    def guardian(self) -> int:
        """The pid of its guardian."""
        pids = processes.children(self.process.pid)
        commands = {pid: processes.read_proc(pid, "cmdline") for pid in pids}
        (guardian,) = [
            pid for pid, line in commands.items() if b"launcher.contain.guardian" in line
        ]
        return guardian

    @property
    def outcome(self) -> dict:
        return json.loads((self.lab.dir / "outcome.json").read_text())


Launch = Callable[..., OwnProcess]
