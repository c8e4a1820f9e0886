"""Play a round: a driver process, signals at their moments, and what was seen of it all."""

import json
import os
import pty
import random
import select
import shutil
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import IO, Any

from launcher.contain import processes
from launcher.contain.processes import Process
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.chaos.plan import Injection, Round
from tests.launcher.supervise.lab import ROOT

DRIVER = Path(__file__).with_name("driver.py")
_RETRY_S = 0.3
_GLANCE_S = 0.001
_LATER_S = 0.03
"""After the workers of a job, the rest gets its signal."""
_APART_S = 0.005
"""At most, between two processes of a job in random order."""
_LOOKS = 3
"""One may miss somebody who forks and ends all the time."""
_MARK = "MODEL_CHECK_CHAOS"
GOES_ON = "SIGTSTP received: no shell is above that could continue this run, so it goes on"
KEYS = {Signals.SIGINT: b"\x03", Signals.SIGQUIT: b"\x1c", Signals.SIGTSTP: b"\x1a"}


@dataclass(frozen=True)
class Entry:
    """A process that told its name: `W0`, `leader`."""

    worker: str
    role: str
    pid: int
    started_ticks: int


@dataclass
class Played:
    """All that was seen of a round."""

    plan: Round
    dir: Path
    result: dict[str, Any] | None = None
    """The driver's; None: it did not live to tell, or hung."""
    hung: bool = False
    returncode: int | None = None
    """The driver's, when it ended."""
    sent_to_us: set[Signals] = field(default_factory=set)
    sent_to: dict[int, set[Signals]] = field(default_factory=dict)
    """pid -> what we have sent it."""
    sent_to_all: set[Signals] = field(default_factory=set)
    """The whole job, also those that have not told their pid."""
    left: list[str] = field(default_factory=list)
    """Who lived on; killed when found."""
    gap_s: float = 0.0
    """How long a signal to the whole job needed to reach all of it."""
    wall_s: float = 0.0


class Stage:
    """Where rounds are played. Close it: its driver ends."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._dir.mkdir(parents=True, exist_ok=True)
        self._mark = f"{_MARK}={os.urandom(16).hex()}"
        self._driver: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._terminal: Terminal | None = None

    @property
    def complaints(self) -> Path:
        """What a driver wrote to its standard error: nothing, if all is well."""
        return self._dir / "stderr"

    def play(self, plan: Round) -> Played:
        """The round, from its plan to the last process of it."""
        directory = self._dir / "round"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        directory.chmod(0o777)  # a child that changed its user keeps books, too
        played = Played(plan, directory)
        started = time.monotonic()
        if plan.terminal == "tty":
            self._open_terminal()
        driver = self._send(plan, directory)
        # Until then the driver throws signals away: they may be meant for the round before.
        self._waits_for(played, (directory / "launcher.log").exists)
        for injection in plan.injections:
            if self._has_ended(played, injection.after_s):
                break
            num_before = num_discarded_stops(played)
            self._inject(injection, played, driver)
            if plan.terminal == "tty" and Signals.SIGTSTP in injection.signals:
                self._await_discarded_stop(played, num_before)
        self._await_end(played, driver, started + DEADLINE_S)
        self._look_for_survivors(played)
        if plan.terminal == "tty":
            self.close()
        played.wall_s = time.monotonic() - started
        return played

    def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None and driver.stdin is not None and driver.stdout is not None:
            driver.stdin.close()
            driver.wait(DEADLINE_S)
            driver.stdout.close()
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    # -- the driver

    def _send(self, plan: Round, directory: Path) -> "subprocess.Popen[bytes]":
        if self._driver is None:
            self._driver = self._start(())
        order = {
            "dir": str(directory),
            "commands": plan.commands,
            "with_events": plan.with_events,
            "grace_s": plan.grace_s,
            "silence_s": plan.silence_s,
            "terminal": plan.terminal,
        }
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(order).encode() + b"\n")
        self._driver.stdin.flush()
        return self._driver

    def _open_terminal(self) -> None:
        """A driver that leads the session of a terminal, for one round."""
        self.close()
        self._terminal = Terminal(self._dir / "round" / "terminal")
        self._driver = self._start(("/bin/sh", "-c", ': < "$0"; exec "$@"', self._terminal.name))

    def _start(self, prefix: Sequence[str]) -> "subprocess.Popen[bytes]":
        name, _, value = self._mark.partition("=")
        with self.complaints.open("ab") as complaints:
            driver = subprocess.Popen(
                (*prefix, sys.executable, "-W", "error", str(DRIVER)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), name: value},
                start_new_session=True,
            )
        assert driver.stdout is not None
        assert os.read(driver.stdout.fileno(), 100) == b"ready\n"  # signals reach it now
        return driver

    def _has_ended(self, played: Played, timeout_s: float) -> bool:
        """Wait for the driver's answer or its death."""
        driver = self._driver
        if played.result is not None or driver is None or driver.stdout is None:
            return True
        until = time.monotonic() + timeout_s
        while not self._heard.endswith(b"\n"):
            if not self._is_heard(driver.stdout, until):
                return False
            data = os.read(driver.stdout.fileno(), 1 << 16)
            if not data:
                self._bury(played, driver)
                return True
            self._heard += data
        played.result, self._heard = json.loads(self._heard), b""
        return True

    def _is_heard(self, answers: IO[bytes], until: float) -> bool:
        """Whether there is an answer by then. The terminal is read meanwhile."""
        while True:
            fds = [answers.fileno(), *(self._terminal.fds if self._terminal else ())]
            ready, _, _ = select.select(fds, [], [], max(0, until - time.monotonic()))
            if answers.fileno() in ready:
                return True
            if not ready:
                return False
            assert self._terminal is not None
            self._terminal.read()

    def _waits_for(self, played: Played, is_so: Callable[[], bool]) -> None:
        """Until it is so, or the round is over; not for ever."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until and not is_so():
            if self._has_ended(played, _GLANCE_S):
                return

    def _await_discarded_stop(self, played: Played, num_before: int) -> None:
        """A later one would not be told apart from it."""
        self._waits_for(played, lambda: num_discarded_stops(played) > num_before)

    def _bury(self, played: Played, driver: "subprocess.Popen[bytes]") -> None:
        played.returncode = driver.wait(DEADLINE_S)
        self._driver, self._heard = None, b""
        for pipe in (driver.stdin, driver.stdout):
            if pipe is not None:
                pipe.close()

    def _await_end(
        self, played: Played, driver: "subprocess.Popen[bytes]", deadline: float
    ) -> None:
        """A stopped supervisor must be continued; again, as it may act on a TSTP only now. The
        leader of a terminal's session must not have stopped."""
        while not self._has_ended(played, _RETRY_S):
            if played.plan.terminal != "tty":
                driver.send_signal(Signals.SIGCONT)
            if time.monotonic() > deadline:
                played.hung = True
                played.left.append(f"HUNG: {describe(driver.pid)}")
                driver.kill()
                self._has_ended(played, DEADLINE_S)

    # -- signals

    def _inject(
        self, injection: Injection, played: Played, driver: "subprocess.Popen[bytes]"
    ) -> None:
        match injection.target:
            case "supervisor":
                self._signal_supervisor(injection, played, driver)
            case "somebody":
                signal_somebody(injection, played)
            case "guardian":
                for pid in guardians(driver.pid):
                    send_to(processes.read_process(pid), injection.signals)
            case "job":
                self._signal_job(injection, played, driver)
            case "terminal":
                self._type(injection, played)

    def _signal_job(
        self, injection: Injection, played: Played, driver: "subprocess.Popen[bytes]"
    ) -> None:
        """Every process of it, each once. SIGINT waits until all workers are up: a Python that is
        still starting answers it with a traceback."""
        (signum,) = injection.signals
        if is_stopped(driver.pid):
            driver.send_signal(Signals.SIGCONT)
        if signum is Signals.SIGINT:
            self._waits_for(played, lambda: all_are_up(played, driver.pid))
        rest = [driver.pid, *guardians(driver.pid)]
        workers = [p.pid for p in self._find(played) if p.pid not in rest]
        started = time.monotonic()
        for pid, pause_s in in_order(injection, workers, rest):
            time.sleep(pause_s)
            send_to(processes.read_process(pid), injection.signals)
        played.sent_to_us.add(signum)
        played.sent_to_all.add(signum)
        played.gap_s = time.monotonic() - started

    def _type(self, injection: Injection, played: Played) -> None:
        """Keys. They reach the supervisor's whole group, and so a worker that was forked and has no
        session of its own yet."""
        assert self._terminal is not None
        for signum in injection.signals:
            played.sent_to_us.add(signum)
            played.sent_to_all.add(signum)
            if signum is Signals.SIGHUP:
                self._terminal.hang_up()
            else:
                self._terminal.type(KEYS[signum])

    def _signal_supervisor(
        self, injection: Injection, played: Played, driver: "subprocess.Popen[bytes]"
    ) -> None:
        was_stopped = is_stopped(driver.pid)
        played.sent_to_us |= set(injection.signals)
        for signum in injection.signals:
            driver.send_signal(signum)
        if was_stopped:
            driver.send_signal(Signals.SIGCONT)

    # -- survivors

    def _look_for_survivors(self, played: Played) -> None:
        """When the supervisor lived, nobody may be left now; when it was killed, the guardian may
        still be at work, so each is waited for."""
        patient = played.result is None
        while found := next(filter(None, (self._find(played) for _ in range(_LOOKS))), None):
            if not patient or not wait_for_death(found[0], DEADLINE_S):
                played.left += [describe(process.pid) for process in found]
                patient = True
                for process in found:
                    send_to(process, (Signals.SIGKILL,))

    def _find(self, played: Played) -> list[Process]:
        known = {(entry.pid, entry.started_ticks) for entry in entries(played.dir)}
        ours = {os.getpid(), self._driver.pid if self._driver else 0}
        table = processes.process_table()
        return [
            process
            for process in table
            if process.pid not in ours
            and process.state not in "ZXx"
            and ((process.pid, process.started_ticks) in known or self._is_marked(process, played))
        ]

    def _is_marked(self, process: Process, played: Played) -> bool:
        if processes.is_tagged(process.pid, self._mark):
            return True
        try:
            return os.readlink(f"/proc/{process.pid}/cwd").startswith(str(played.dir))
        except OSError:
            return False


class Terminal:
    """A pseudo terminal that writes what it shows into a file."""

    def __init__(self, shown: Path) -> None:
        self._master, self._slave = pty.openpty()
        tty.setraw(self._slave)  # the bytes as they are, no echo; but keys are signals:
        mode = termios.tcgetattr(self._slave)
        mode[tty.LFLAG] |= termios.ISIG
        termios.tcsetattr(self._slave, termios.TCSANOW, mode)
        os.set_blocking(self._master, False)
        self.name = os.ttyname(self._slave)
        self.fds = [self._master]
        """To be watched."""
        self._shown = shown

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read(self) -> None:
        """What there is to read now."""
        with suppress(BlockingIOError), self._shown.open("ab") as file:
            while data := os.read(self._master, 1 << 16):
                file.write(data)

    def hang_up(self) -> None:
        self.read()
        self.fds = []
        os.close(self._master)

    def close(self) -> None:
        if self.fds:
            self.hang_up()
        os.close(self._slave)


def in_order(
    injection: Injection, workers: list[int], rest: list[int]
) -> Iterator[tuple[int, float]]:
    """Each pid, and how long before it to wait. `rest`: the supervisor, the guardian."""
    dice = random.Random(injection.pick)
    match injection.order:
        case "launcher first":
            yield from ((pid, 0.0) for pid in (*rest, *workers))
        case "workers first":
            yield from ((pid, 0.0) for pid in workers)
            yield from zip(rest, (_LATER_S, *[0.0] * len(rest)), strict=False)
        case "random order":
            pids = dice.sample([*rest, *workers], len(rest) + len(workers))
            yield from ((pid, dice.uniform(0, _APART_S)) for pid in pids)


def num_discarded_stops(played: Played) -> int:
    """A Ctrl-Z that is discarded while the run ends is not told: there is nothing left to stop."""
    return (played.dir / "launcher.log").read_bytes().count(GOES_ON.encode())


def is_stopped(pid: int) -> bool:
    row = processes.read_process(pid)
    return row is not None and row.state == "T"


def guardians(supervisor: int) -> list[int]:
    children = processes.children(supervisor)
    return [pid for pid in children if "launcher.contain.guardian" in describe(pid)]


def all_are_up(played: Played, supervisor: int) -> bool:
    """Whether each worker runs its own command, and has told its name if it has one."""
    plan, up = played.plan, {entry.worker for entry in entries(played.dir)}
    started = [describe(pid) for pid in processes.children(supervisor)]
    is_starting = any("launcher.contain.trampoline" in command for command in started)
    return up >= {name for name in plan.commands if plan.actions(name)} and not is_starting


def signal_somebody(injection: Injection, played: Played) -> None:
    """A worker or a child of one, of those who have told their pid so far."""
    known = entries(played.dir)
    if not known:
        return
    entry = known[injection.pick % len(known)]
    row = processes.read_process(entry.pid)
    if row is not None and row.started_ticks == entry.started_ticks:
        played.sent_to.setdefault(entry.pid, set()).update(injection.signals)
        send_to(row, injection.signals)


def send_to(process: Process | None, signals: tuple[Signals, ...]) -> None:
    """To exactly this process, if it still lives."""
    pidfd = processes.hold(process) if process is not None else None
    if pidfd is not None:
        processes.send(pidfd, *signals)
        os.close(pidfd)


def wait_for_death(process: Process, timeout_s: float) -> bool:
    pidfd = processes.hold(process)
    if pidfd is None:
        return True
    waiter = select.poll()
    waiter.register(pidfd, select.POLLIN)
    is_dead = bool(waiter.poll(timeout_s * 1000))
    os.close(pidfd)
    return is_dead


def entries(directory: Path) -> list[Entry]:
    """Everybody who has told its pid so far."""
    try:
        lines = (directory / "pids").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in lines]
    return [Entry(worker, role, int(pid), int(ticks)) for worker, role, pid, ticks in rows]


def describe(pid: int) -> str:
    """For people: its state and its command line."""
    row = processes.read_process(pid)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        command = "?"
    return f"{row} {command}"
