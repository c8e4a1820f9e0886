"""One child process: how it starts, what state it is in, what is known of how it ended."""

import errno
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from statistics import median

from msgspec import Struct, convert, field
from msgspec.structs import replace

from launcher.contain import processes, trampoline
from launcher.contain.linux import P_PIDFD, pidfd_open, thread_send_signal
from launcher.plan import WorkerSpec
from launcher.supervise import stacks
from launcher.supervise.policy import IDLE_S, Confession, WorkerView
from launcher.verdict.last_lines import last_lines
from launcher.verdict.record import WorkerEnd
from model_check.errors import EXIT_INTERNAL, EXIT_NON_FINITE, ModelCheckError, describe_exit
from model_check.events import STACKS_SIGNAL, Done, Event, NonFinite, Phase, Scalar, Step
from model_check.utils.child import child_command
from model_check.utils.secrets import masked
from model_check.utils.wire import EVENTS_FD
from model_check.utils.worker_env import RUN_TAG

_NUM_STEPS = 9
_NUM_LAST_LINES = 50
_LAST_LINE_CHARS = 2000
_KEPT_LINE_CHARS = 8000
"""More than is quoted, so that a secret that is cut off there is known by its whole."""
_START = "start, before its first event"


class State(Enum):
    """Where a worker is in its life; it only moves down this list."""

    PLANNED = "planned"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class SpawnError(ModelCheckError):
    """No process could be made. The message names the errno; `exit_code` is 70 or 126."""

    def __init__(self, what: str, error: OSError | ValueError) -> None:
        """`what` failed for this reason."""
        why, self.exit_code = str(error), EXIT_INTERNAL
        if isinstance(error, OSError):
            why = f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"
            if error.errno == errno.E2BIG:
                self.exit_code = trampoline.EXIT_CANNOT_EXECUTE
        super().__init__(f"{what}: {why}")


class Spawned(Struct, frozen=True):
    """A started process and our ends of what connects us. The descriptors are the receiver's."""

    process: "subprocess.Popen[bytes]"
    pidfd: int
    output_fd: int
    """Its standard output and error, in one pipe; non-blocking."""
    report_fd: int
    """The trampoline's report: end of file when the command has started, else why it could not."""
    events_fd: int | None
    """Our end of its event socket; non-blocking. None: it has none."""


Spawn = Callable[[WorkerSpec, str, int | None], Spawned]
"""Start a worker with this run tag, in the cgroup of this descriptor. Raises SpawnError."""


class Worker(WorkerView, eq=False, kw_only=True):
    """One worker and all that is known of it. Times are monotonic seconds."""

    spec: WorkerSpec
    held_signals: list[signal.Signals] = field(default_factory=list)
    """Forwarded as soon as it can take them."""
    state: State = State.PLANNED
    spawned: Spawned | None = None
    pid: int | None = None
    duration_s: float = 0.0
    evidence: tuple[str, ...] = ()
    _stopped_with: signal.Signals | None = None
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))
    """How long the last ones took."""
    _work: dict[int, stacks.Work] = field(default_factory=dict)
    """What its threads had done when it was looked at last."""
    _looked_at: float = float("-inf")
    _stacks_signal: int | None = None
    _takes_signals: bool = False

    @property
    def alive(self) -> bool:
        return self.state in (State.RUNNING, State.STOPPING)

    @property
    def stopped_by_us(self) -> bool:
        return self._stopped_with is not None

    def end(self) -> WorkerEnd:
        """Its last lines are masked as one text: a secret may have several."""
        lines = masked("\n".join(self.last_lines)).split("\n") if self.last_lines else ()
        quoted = tuple(line[:_LAST_LINE_CHARS] for line in lines)
        return replace(convert(self, WorkerEnd, from_attributes=True), last_lines=quoted)

    def has_started(self, spawned: Spawned, now: float) -> None:
        self.spawned, self.pid = spawned, spawned.process.pid
        self.state = State.RUNNING
        self.started_at = self.last_heard = now
        self.patient_phase = _START if self.spec.announces_itself else None

    def look_at_work(self, now: float) -> None:
        """Whether it does anything: `is_idle`. The first look tells nothing yet."""
        if self.pid is None or not self.alive or now - self._looked_at < IDLE_S:
            return
        work = stacks.work_of_all(self.pid)
        self.is_idle = bool(work) and work == self._work and not stacks.is_awake(work)
        self._work, self._looked_at = work, now

    def cannot_start(self, error: SpawnError, now: float, wake: int) -> None:
        self.spawn_error = str(error)
        self.started_at = now
        self._end(error.exit_code, now, wake)

    def take_report(self, why_not: bytearray) -> None:
        """The trampoline's report, which is empty when the command's own code runs: signals that
        would have killed the trampoline can be forwarded then."""
        if why_not:
            self.spawn_error = why_not.decode(errors="replace")
        elif not self.spec.announces_itself:
            self._forward_held()

    def forward(self, signum: signal.Signals) -> None:
        """Send a signal to the command itself, not to its group: its helpers may not expect it."""
        if not self._takes_signals:
            self.held_signals.append(signum)
        elif self.alive and self.spawned:
            processes.send(self.spawned.pidfd, signum)

    def _forward_held(self) -> None:
        self._takes_signals = True
        while self.held_signals:
            self.forward(self.held_signals.pop(0))

    def ask_for_stacks(self, tid: int | None = None) -> bool:
        """Have it write its stacks, if it offered that; whether it was asked. The signal kills a
        process that has no handler for it, so the offer alone is not enough: the process may run
        another program by now. `tid`: the thread that is to answer, and to mark its own stack as
        that of the current one; None: the kernel takes the main one, if it can."""
        signum = self._stacks_signal
        if signum is None or not self.alive or self.spawned is None:
            return False
        if not stacks.catches(self.spawned.process.pid, signum):
            return False
        if tid is None:
            processes.send(self.spawned.pidfd, signum)
        else:
            with suppress(OSError):
                thread_send_signal(self.spawned.process.pid, tid, signum)
        return True

    def check_exit(self, now: float, wake: int) -> bool:
        """Whether it ended just now. It stays a zombie: its pid, and so its group's number, stay
        taken until `release`."""
        if not self.alive or self.spawned is None:
            return False
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        ended = os.waitid(P_PIDFD, self.spawned.pidfd, flags)
        if ended is None:
            return False
        exited = ended.si_code == os.CLD_EXITED
        self._end(ended.si_status if exited else -ended.si_status, now, wake)
        return True

    def signal_group(self, *signals: signal.Signals) -> None:
        """Signal every process of its group, also when the worker itself is dead."""
        if self.spawned is not None:
            processes.send_group(self.spawned.process.pid, *signals)

    def suspend(self) -> None:
        """Stop its group until it is continued. SIGSTOP, since no SIGTSTP stops an orphaned one."""
        self.signal_group(signal.SIGSTOP)

    def stop(self, signum: signal.Signals) -> None:
        """End its group. A stopped process acts on the signal when it is continued."""
        if self.alive:
            self.state = State.STOPPING
            self._stopped_with = signum
        self.signal_group(signum, signal.SIGCONT)

    def hear(self, event: Event, now: float) -> None:
        """Learn from its event. `now`: when the event was read, not when the loop woke up."""
        self.last_heard = now
        self._forward_held()
        stamp = event.t / 1e9
        # A stamp from before its start or from the future proves nothing.
        at = stamp if (self.started_at or 0.0) <= stamp <= now else now
        match event:
            case Phase():
                is_first = self.last_step is None
                trains = "train, before its first step" if is_first else None
                self.patient_phase = trains if event.name == "train" else event.name
                self._stacks_signal = _real_time_signal(event.detail) or self._stacks_signal
            case Step():
                self.patient_phase, self.last_step = None, event.step
                self._steps_s.append(event.ms / 1000)
                self.step_s = median(self._steps_s)
                self.confession = None  # it went on after a NaN, so it does not end of that
            case NonFinite() if self.confession is None:
                self.confession = Confession(
                    at, EXIT_NON_FINITE, now, False, event.step, event.evidence_bytes
                )
            case Done():
                self.error = event.error
                if event.exit_code != 0:
                    self._confess(event, at, now)

    def _confess(self, done: Done, at: float, now: float) -> None:
        """It says that it failed; of a NaN it may have spoken before."""
        step = None if self.last_step is None else self.last_step + 1
        if (before := self.confession) is not None:
            at, step = before.at, before.step
        self.confession = Confession(
            at, done.exit_code, now, True, step, peer_lost=done.peer_lost and before is None
        )

    def remember(self, lines: list[str]) -> None:
        """Keep the end of its output."""
        newest = (line[:_KEPT_LINE_CHARS] for line in lines)
        self.last_lines = last_lines((*self.last_lines, *newest), _NUM_LAST_LINES)

    def release(self) -> None:
        """Nothing of its group is left: reap it, and let its pid go."""
        if self.spawned is None:
            return
        os.close(self.spawned.pidfd)
        if self.state is State.EXITED:
            self.spawned.process.wait()
        else:  # SIGKILL had no effect on it; without this, Popen warns that nobody waited
            self.spawned.process.returncode = -signal.SIGKILL

    def _end(self, returncode: int, now: float, wake: int) -> None:
        self.state = State.EXITED
        self.returncode = returncode
        self.ended_at = now
        if self.started_at is not None:
            self.duration_s = now - self.started_at
        self.wake = wake

    def __repr__(self) -> str:
        who = f"{self.name} pid {self.pid}" if self.pid else self.name
        return f"<Worker {who} {self._describe()}>"

    def _describe(self) -> str:
        if self.spawn_error is not None:
            return f"could not start: {self.spawn_error}"
        if self.returncode is None:
            return self.state.value
        how = describe_exit(self.returncode)
        if self._stopped_with is not None:
            how = f"stopped by us ({self._stopped_with.name})"
        return f"{how} after {self.duration_s:.1f} s"


def _real_time_signal(detail: Mapping[str, Scalar]) -> int | None:
    """The signal that a worker offers; only a real-time one, as no other is free."""
    signum = detail.get(STACKS_SIGNAL)
    if isinstance(signum, int) and signal.SIGRTMIN < signum < signal.SIGRTMAX:
        return signum
    return None


def spawn(spec: WorkerSpec, run_tag: str, cgroup_fd: int | None = None) -> Spawned:
    """Start a worker. Call it from the main thread: its death would take the worker along.
    `cgroup_fd`: where the worker enters the run's cgroup; None: the run has none."""
    with ExitStack() as ours, ExitStack() as theirs:
        try:
            output_fd, output_end = _connect(os.pipe2(os.O_CLOEXEC), ours, theirs)
            report_fd, report_end = _connect(os.pipe2(os.O_CLOEXEC), ours, theirs)
            events_fd, events_end = None, None
            if spec.events_path is not None:
                pair = socket.socketpair()
                ends = pair[0].detach(), pair[1].detach()
                events_fd, events_end = _connect(ends, ours, theirs)
            process = _popen(spec, run_tag, output_end, report_end, events_end, cgroup_fd)
            ours.callback(process.wait)
            ours.callback(process.kill)  # before that: the last callback is the first
            pidfd = pidfd_open(process.pid)
            spawned = Spawned(process, pidfd, output_fd, report_fd, events_fd)
        except (OSError, ValueError) as error:
            raise SpawnError("no process for it", error) from error
        ours.pop_all()
        return spawned


def _connect(pair: tuple[int, int], ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    ours.callback(os.close, pair[0])
    theirs.callback(os.close, pair[1])
    os.set_blocking(pair[0], False)
    return pair


def _popen(
    spec: WorkerSpec,
    run_tag: str,
    output: int,
    report: int,
    events: int | None,
    cgroup_fd: int | None,
) -> "subprocess.Popen[bytes]":
    cpus = ",".join(map(str, sorted(spec.cpus & os.sched_getaffinity(0))))
    drop_lc_ctype = "0" if "LC_CTYPE" in spec.env else "1"
    inherited = [fd for fd in (events, cgroup_fd) if fd is not None]
    entry = "" if cgroup_fd is None else str(cgroup_fd)
    ours = (str(os.getpid()), str(report), entry, cpus, drop_lc_ctype)
    return subprocess.Popen(
        child_command("launcher.contain.trampoline", *ours, *spec.argv),
        env=_environment(spec, run_tag, events),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=(report, *spec.inherited_fds, *inherited),
    )


def _environment(spec: WorkerSpec, run_tag: str, events: int | None) -> dict[str, str]:
    """The worker's environment, plus the tag: appended, so that a supervisor around this one still
    finds its own tag."""
    outer = spec.env.get(RUN_TAG)
    environment = {**spec.env, RUN_TAG: f"{outer}:{run_tag}" if outer else run_tag}
    environment.pop(EVENTS_FD, None)  # of a supervisor around this one: no socket of ours
    if events is not None:
        environment[EVENTS_FD] = str(events)
    return environment
