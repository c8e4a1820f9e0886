"""One child process: how it starts, what state it is in, what is known of how it ended."""

import errno
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum

from msgspec import Struct

from launcher.contain import processes, trampoline
from launcher.contain.linux import P_PIDFD, pidfd_open
from launcher.plan import WorkerSpec
from launcher.supervise import stacks
from launcher.supervise.policy import Confession, WorkerView
from launcher.verdict.record import WorkerEnd
from model_check.errors import EXIT_INTERNAL, EXIT_NON_FINITE, ModelCheckError, describe_exit
from model_check.events import STACKS_SIGNAL, Done, Event, NonFinite, Phase, Scalar, Step
from model_check.utils.child import child_command
from model_check.utils.worker_env import EVENTS_FD, RUN_TAG

_NUM_LAST_LINES = 50
_LAST_LINE_CHARS = 2000


class State(Enum):
    """Where a worker is in its life; it only moves down this list."""

    PLANNED = "planned"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class SpawnError(ModelCheckError):
    """A process could not be made. The message names the errno; `exit_code` is 70 or 126."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Spawned(Struct, frozen=True):
    """A started process and our ends of what connects us. The descriptors are the receiver's."""

    process: "subprocess.Popen[bytes]"
    pidfd: int
    output_fd: int
    """Its standard output and error, merged; non-blocking."""
    report_fd: int
    """The trampoline's: end of file when the command has started, else why it could not."""
    events_fd: int | None
    """Our end of its event socket; non-blocking."""


Spawn = Callable[[WorkerSpec, str], Spawned]
"""Start a worker with this run tag. Raises SpawnError."""


class Worker:
    """One worker and all that is known of it. Times are CLOCK_MONOTONIC nanoseconds."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.state = State.PLANNED
        self.spawned: Spawned | None = None
        self.returncode: int | None = None
        self.spawn_error: str | None = None
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.last_heard_ns = 0
        self.evidence: tuple[str, ...] = ()
        self.oom: str | None = None
        self._started_ns: int | None = None
        self._ended_ns: int | None = None
        self._wake = 0
        self._stopped_with: signal.Signals | None = None
        self._confession: Confession | None = None
        self._error: str | None = None
        self._phase: str | None = None
        self._has_stepped = False
        self._stacks_signal: int | None = None
        self._held_back: list[signal.Signals] | None = []  # until it can take them; then None

    @property
    def pid(self) -> int | None:
        return self.spawned.process.pid if self.spawned else None

    @property
    def alive(self) -> bool:
        return self.state in (State.RUNNING, State.STOPPING)

    @property
    def was_killed(self) -> bool:
        """It ended by SIGKILL, and not by ours."""
        return self.returncode == -signal.SIGKILL and self._stopped_with is None

    def has_started(self, spawned: Spawned, now_ns: int) -> None:
        self.spawned = spawned
        self.state = State.RUNNING
        self._started_ns = self.last_heard_ns = now_ns

    def cannot_start(self, error: SpawnError, now_ns: int, wake: int) -> None:
        self.spawn_error = str(error)
        self._started_ns = now_ns
        self._end(error.exit_code, now_ns, wake)

    def command_runs(self) -> None:
        """The trampoline is gone: signals that would have killed it can be passed on."""
        if not self.spec.announces_itself:
            self._take_signals()

    def forward(self, signum: signal.Signals) -> None:
        """Pass a signal to the command itself, not to its group: its helpers may not expect it."""
        if self._held_back is not None:
            self._held_back.append(signum)
        elif self.alive and self.spawned:
            processes.send(self.spawned.pidfd, signum)

    def _take_signals(self) -> None:
        held_back, self._held_back = self._held_back or [], None
        for signum in held_back:
            self.forward(signum)

    def ask_for_stacks(self) -> bool:
        """Have it write its stacks, if it offered that; whether it was asked. The signal kills
        whoever has no handler for it, so its word alone is not enough: it may run another program
        by now."""
        signum = self._stacks_signal
        if signum is None or not self.alive or self.spawned is None:
            return False
        if not stacks.catches(self.spawned.process.pid, signum):
            return False
        processes.send(self.spawned.pidfd, signum)
        return True

    def check_exit(self, now_ns: int, wake: int) -> bool:
        """Whether it ended just now. It stays a zombie: its pid, and so its group's number, stay
        taken until `release`."""
        if not self.alive or self.spawned is None:
            return False
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        ended = os.waitid(P_PIDFD, self.spawned.pidfd, flags)
        if ended is None:  # a debugger holds its end back; SIGCHLD follows when it lets go
            return False
        exited = ended.si_code == os.CLD_EXITED
        self._end(ended.si_status if exited else -ended.si_status, now_ns, wake)
        return True

    def signal_group(self, *signals: signal.Signals) -> None:
        """Signal everybody in its group, whether it lives itself or not."""
        if self.spawned is not None:
            processes.send_group(self.spawned.process.pid, *signals)

    def stop(self, signum: signal.Signals) -> None:
        """End its group. A stopped process acts on the signal when it is continued."""
        if self.alive:
            self.state = State.STOPPING
            self._stopped_with = signum
        self.signal_group(signum, signal.SIGCONT)

    def hear(self, event: Event, now_ns: int) -> None:
        """Learn from what it said."""
        self.last_heard_ns = now_ns
        if self._held_back is not None:
            self._take_signals()
        now_s = now_ns / 1e9
        # A stamp from before its start or from the future proves nothing.
        stamp_s = event.t / 1e9 if (self._started_ns or 0) <= event.t <= now_ns else now_s
        match event:
            case Phase():
                self._phase = event.name
                self._stacks_signal = _real_time_signal(event.detail) or self._stacks_signal
            case Step():
                self._phase, self._has_stepped = "train", True
                self._confession = None  # it went on after a NaN: not what it ends of
            case NonFinite() if self._confession is None:
                self._confession = Confession(stamp_s, EXIT_NON_FINITE, now_s, final=False)
            case Done():
                self._error = event.error
                if event.exit_code != 0:
                    at = self._confession.at if self._confession else stamp_s
                    self._confession = Confession(at, event.exit_code, now_s, final=True)

    def remember(self, lines: list[str]) -> None:
        """Keep the end of its output."""
        self.last_lines.extend(line[:_LAST_LINE_CHARS] for line in lines[-_NUM_LAST_LINES:])

    def release(self) -> None:
        """Nothing of its group is left: reap it, and let its pid go."""
        if self.spawned is None:
            return
        os.close(self.spawned.pidfd)
        if self.state is State.EXITED:
            self.spawned.process.wait()
        else:  # it can't be killed: Popen must not warn that nobody waited
            self.spawned.process.returncode = -signal.SIGKILL

    def view(self) -> WorkerView:
        return WorkerView(
            name=self.spec.name,
            returncode=self.returncode,
            spawn_error=self.spawn_error,
            oom=self.oom,
            started_at=None if self._started_ns is None else self._started_ns / 1e9,
            last_heard=self.last_heard_ns / 1e9,
            patient_phase=self._patient_phase,
            confession=self._confession,
            ended_at=(self._ended_ns or 0) / 1e9,
            wake=self._wake,
            error=self._error,
        )

    @property
    def _patient_phase(self) -> str | None:
        """None also for a foreign command, which never tells a phase."""
        if self._phase != "train":
            return self._phase
        return None if self._has_stepped else "train, before its first step"

    def end(self) -> WorkerEnd:
        return WorkerEnd(
            name=self.spec.name,
            returncode=self.returncode,
            spawn_error=self.spawn_error,
            oom=self.oom,
            pid=self.pid,
            stopped_by_us=self._stopped_with is not None,
            duration_s=self._duration_s,
            last_lines=tuple(self.last_lines),
            evidence=self.evidence,
        )

    @property
    def _duration_s(self) -> float:
        if self._started_ns is None or self._ended_ns is None:
            return 0.0
        return (self._ended_ns - self._started_ns) / 1e9

    def _end(self, returncode: int, now_ns: int, wake: int) -> None:
        self.state = State.EXITED
        self.returncode = returncode
        self._ended_ns = now_ns
        self._wake = wake

    def __repr__(self) -> str:
        who = f"{self.spec.name} pid {self.pid}" if self.pid else self.spec.name
        return f"<Worker {who} {self._describe()}>"

    def _describe(self) -> str:
        if self.spawn_error is not None:
            return f"could not start: {self.spawn_error}"
        if self.returncode is None:
            return self.state.value
        how = describe_exit(self.returncode)
        if self._stopped_with is not None:
            how = f"stopped by us ({self._stopped_with.name})"
        return f"{how} after {self._duration_s:.1f} s"


def _real_time_signal(detail: Mapping[str, Scalar]) -> int | None:
    """The signal that a worker offers; only a real-time one, as no other is free."""
    signum = detail.get(STACKS_SIGNAL)
    if isinstance(signum, int) and signal.SIGRTMIN < signum < signal.SIGRTMAX:
        return signum
    return None


def spawn(spec: WorkerSpec, run_tag: str) -> Spawned:
    """Start a worker. Call it from the main thread: its death would take the worker along."""
    ours: list[int] = []  # descriptors to close when anything fails
    theirs: list[int] = []
    try:
        output_fd, output_end = _connect(os.pipe2(os.O_CLOEXEC), ours, theirs)
        report_fd, report_end = _connect(os.pipe2(os.O_CLOEXEC), ours, theirs)
        events_fd, events_end = None, None
        if spec.events_path is not None:
            pair = [end.detach() for end in socket.socketpair()]
            events_fd, events_end = _connect((pair[0], pair[1]), ours, theirs)
        process = _popen(spec, run_tag, output_end, report_end, events_end)
        return Spawned(process, _pidfd(process), output_fd, report_fd, events_fd)
    except (OSError, ValueError) as error:
        for fd in ours:
            os.close(fd)
        raise spawn_error("no process for it", error) from error
    finally:
        for fd in theirs:
            os.close(fd)


def _connect(pair: tuple[int, int], ours: list[int], theirs: list[int]) -> tuple[int, int]:
    ours.append(pair[0])
    theirs.append(pair[1])
    os.set_blocking(pair[0], False)
    return pair


def _popen(
    spec: WorkerSpec, run_tag: str, output: int, report: int, events: int | None
) -> "subprocess.Popen[bytes]":
    cpus = ",".join(map(str, sorted(spec.cpus & os.sched_getaffinity(0))))
    drop_lc_ctype = "0" if "LC_CTYPE" in spec.env else "1"
    ours = (str(os.getpid()), str(report), cpus, drop_lc_ctype)
    return subprocess.Popen(
        child_command("launcher.contain.trampoline", *ours, *spec.argv),
        env=_environment(spec, run_tag, events),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=(report,) if events is None else (report, events),
    )


def _environment(spec: WorkerSpec, run_tag: str, events: int | None) -> dict[str, str]:
    """The worker's, plus the tag: appended, so that a supervisor around this one still finds its
    own."""
    outer = spec.env.get(RUN_TAG)
    environment = {**spec.env, RUN_TAG: f"{outer}:{run_tag}" if outer else run_tag}
    environment.pop(EVENTS_FD, None)  # of a supervisor around this one: no socket of ours
    if events is not None:
        environment[EVENTS_FD] = str(events)
    return environment


def _pidfd(process: "subprocess.Popen[bytes]") -> int:
    try:
        return pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def spawn_error(what: str, error: OSError | ValueError) -> SpawnError:
    """`what` failed for this reason, which it names."""
    if not isinstance(error, OSError):
        return SpawnError(f"{what}: {error}", EXIT_INTERNAL)
    name = errno.errorcode.get(error.errno or 0, "error")
    too_long = error.errno == errno.E2BIG
    code = trampoline.EXIT_CANNOT_EXECUTE if too_long else EXIT_INTERNAL
    return SpawnError(f"{what}: {name}: {error.strerror}", code)
