"""The supervisor's side of telemetry: starts the sampler, keeps what it tells, and outlives it.

Nothing here can end a run or hold it up: a driver call that never returns is the sampler's to wait
for; its silence is told in one line, and telemetry ends.

What is told lands in `gpu3.telemetry.jsonl`, beside the worker's own `gpu3.events.jsonl`: that file
is the worker's, byte for byte, and its socket may end long before the GPU has nothing more to tell.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from launcher import run_dir
from launcher.contain import linux
from launcher.output.append_file import AppendFile
from launcher.telemetry.health import Record, trouble_symptom
from launcher.telemetry.sampler import ANNOUNCEMENT_BYTES
from launcher.telemetry.xids import xid_symptom
from launcher.verdict.health import Health
from model_check.events import SCHEMA, GpuEvent, Trouble, Watched, Xid, encode
from model_check.utils.child import child_command
from model_check.utils.requests import requests_held

DEADLINE_S = 10.0
"""A GPU without persistence mode takes seconds to wake up; a driver that hangs, for ever."""
END_WAIT_S = 1.0
"""For the last look, which the sampler began when the workers were asked to end."""
_REAP_WAIT_S = 0.2
_READ_BYTES = 1 << 16

_decoder = msgspec.json.Decoder(tuple[str, GpuEvent])


class Monitor:
    """Telemetry of the GPUs of one run. A `Companion` of the supervisor."""

    def __init__(
        self,
        uuids: Mapping[str, str],
        directory: Path | None,
        interval_s: float,
        say: Callable[[str], None],
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`uuids`: worker -> its GPU or MIG instance. `directory`: where what is told is kept;
        None: only in `records`."""
        self.records = {worker: Record() for worker in uuids}
        self._uuids = dict(uuids)
        self._directory = directory
        self._interval_s = interval_s
        self._say = say
        self._deadline_s = deadline_s
        self._sampler: subprocess.Popen[bytes] | None = None
        self._announcement_fd: int | None = None
        self._files: dict[str, AppendFile] = {}
        self._rest = b""
        self._last_heard = 0.0
        self._asked_at: float | None = None  # to end
        self._is_over = True

    @property
    def pid(self) -> int | None:
        return self._sampler.pid if self._sampler else None

    @property
    def fd(self) -> int | None:
        """What to read from when it is readable, until `close`; None: there is no sampler."""
        return self._sampler.stdout.fileno() if self._sampler and self._sampler.stdout else None

    @property
    def healths(self) -> dict[str, Health | None]:
        """What was told of each worker's GPU so far comes down to this."""
        return {worker: record.health() for worker, record in self.records.items()}

    @property
    def due(self) -> float:
        """When `tick` has something to do, monotonic seconds."""
        if self._is_over:
            return float("inf")
        return self._last_heard + self._deadline_s + self._interval_s

    def start(self, now: float) -> None:
        """Start the sampler. From the main thread: its death would take the sampler along."""
        if self._directory is not None:
            self._open_files(self._directory)
        try:
            self._announcement_fd = linux.memfd_create("model_check_nvml")
            with requests_held():
                self._sampler = subprocess.Popen(
                    command(self._uuids, self._announcement_fd, self._interval_s),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C is the supervisor's to answer
                    pass_fds=(self._announcement_fd,),
                )
        except OSError as error:
            self._blind(f"its process cannot be started ({error.strerror})")
            return
        self._is_over, self._last_heard = False, now

    def _open_files(self, directory: Path) -> None:
        for worker, uuid in self._uuids.items():
            path = run_dir.telemetry_path(directory, worker)
            self._files[worker] = AppendFile(path, self._say)
            self._keep(worker, Watched(uuid=uuid, interval_s=self._interval_s, schema=SCHEMA))

    def read(self, now: float) -> bool:
        """Take what there is to read; False: this was the end of it."""
        data = os.read(self.fd, _READ_BYTES) if self.fd is not None else b""
        if not data:
            self._has_ended()
            return False
        self._last_heard = now
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        return True

    def tick(self, now: float) -> None:
        """Give the sampler up when it has been silent for too long."""
        if now >= self.due:
            silent_s = self._deadline_s + self._interval_s
            self._give_up(f"NVML was silent for {silent_s:g} s")

    def forgive_silence(self, now: float) -> None:
        """Nobody ran until now: the sampler gets its whole time again."""
        self._last_heard = max(self._last_heard, now)

    def finish(self) -> None:
        """The workers are asked to end: have the sampler take its last look. Does not wait."""
        self._asked_at = self._asked_at or time.monotonic()
        if self._sampler and self._sampler.stdin:
            self._sampler.stdin.close()

    def close(self, wait_s: float = END_WAIT_S) -> None:
        """Hear the last look, if it comes within `wait_s` of `finish`; let everything go."""
        self.finish()
        until = (self._asked_at or 0.0) + wait_s
        while not self._is_over and self.fd is not None:
            if _is_readable(self.fd, until - time.monotonic()):
                self.read(self._last_heard)
            else:
                self._give_up(f"there was no last look within {wait_s:g} s")
        self._reap()
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._announcement_fd is not None:
            os.close(self._announcement_fd)
            self._announcement_fd = None

    def _take(self, line: bytes) -> None:
        try:
            worker, event = _decoder.decode(line)
        except msgspec.DecodeError as error:
            if not self._is_over:
                self._give_up(f"its process wrote what is no event ({error})")
            return
        for name in [worker] if worker else list(self._uuids):
            self._keep(name, event)
        self._tell(worker, event)

    def _keep(self, worker: str, event: GpuEvent) -> None:
        self.records[worker].record(event)
        if worker in self._files:
            self._files[worker].write(encode(event))

    def _tell(self, worker: str, event: GpuEvent) -> None:
        match event:
            case Xid() if self.records[worker].num_seen(event.xid) == 1:  # it may repeat for ever
                self._say(f"{worker}: {xid_symptom(event.xid)}")
            case Trouble():
                self._say(f"{worker or 'NVML'}: {trouble_symptom(worker, event)}")

    def _has_ended(self) -> None:
        """The sampler closed its output: by itself only after the last look that it was asked for,
        or when all GPUs are lost."""
        is_asked = self._asked_at is not None and self._ended_well()
        is_expected = is_asked or all(record.is_lost for record in self.records.values())
        if not self._is_over and not is_expected:
            self._blind(f"its process ended{self._in_flight()}")
        self._is_over = True

    def _ended_well(self) -> bool:
        """A driver that crashes it in its last look leaves the end of the run untold."""
        if self._sampler is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._sampler.wait(_REAP_WAIT_S)
        return not self._sampler.returncode

    def _give_up(self, why: str) -> None:
        self._blind(why + self._in_flight())
        self._is_over = True
        if self._sampler is not None:
            self._sampler.kill()

    def _blind(self, why: str) -> None:
        """One line, and every GPU's record, say that telemetry ends."""
        goes_on = "; the run goes on" if self._asked_at is None else ""
        self._say(f"no more telemetry: {why}{goes_on}")
        trouble = Trouble(t=time.monotonic_ns(), call="telemetry", text=why, lost=True)
        for worker in self._uuids:
            self._keep(worker, trouble)

    def _in_flight(self) -> str:
        """The call that has not returned, as the sampler announced it."""
        if self._announcement_fd is None:
            return ""
        announced = os.pread(self._announcement_fd, ANNOUNCEMENT_BYTES, 0).strip()
        call = announced.decode(errors="replace")
        return f" ({call} did not return; see `dmesg | grep -i nvrm`)" if call else ""

    def _reap(self) -> None:
        if self._sampler is None:
            return
        for end in (self._sampler.stdin, self._sampler.stdout):
            if end is not None:
                end.close()
        with suppress(subprocess.TimeoutExpired):
            self._sampler.wait(_REAP_WAIT_S)
        if self._sampler.returncode is None:  # stuck in the kernel: not even SIGKILL ends it
            self._sampler.kill()
            self._sampler.returncode = -signal.SIGKILL  # Popen must not warn that nobody waited
        self._sampler = None


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Not by `select`, which knows 1024 descriptors: many workers take more."""
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    return bool(waiter.poll(max(0.0, timeout_s) * 1000))


def command(uuids: Mapping[str, str], announcement_fd: int, interval_s: float) -> list[str]:
    """How the sampler is started, by this process."""
    devices = msgspec.json.encode(list(uuids.items())).decode()
    arguments = (str(os.getpid()), str(announcement_fd), str(interval_s), devices)
    return child_command("launcher.telemetry.sampler", *arguments)


def look(uuids: Mapping[str, str], deadline_s: float = DEADLINE_S) -> dict[str, Record]:
    """What telemetry says of these GPUs (label -> UUID) at this moment, in records of one sample.
    NVML in trouble, or silent for `deadline_s`, is told in them; nothing is raised."""
    monitor = Monitor(uuids, None, 0.0, lambda _: None)
    monitor.start(time.monotonic())
    monitor.close(deadline_s)
    return monitor.records
