"""The supervisor's side of telemetry: starts the sampler, keeps what it reports, and outlives it.

Nothing here can end a run or hold it up: only the sampler waits for a driver call that never
returns; its silence is said in one line, and telemetry ends.

The events land in `gpu3.telemetry.jsonl`, beside the worker's own `gpu3.events.jsonl`: that file is
what the worker wrote, byte for byte, and its socket may end long before the GPU's last event.
"""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from launcher.gpus.nvml_child import NvmlChild
from launcher.output.append_file import AppendFile
from launcher.telemetry.health import Record, trouble_symptom
from launcher.telemetry.xids import xid_symptom
from launcher.verdict.health import Health
from model_check.events import GpuEvent, Trouble, Watched, Xid, encode
from model_check.utils.wire import SCHEMA
from model_check.utils.worker_env import telemetry_path

DEADLINE_S = 10.0
"""A GPU without persistence mode takes seconds to wake up; a driver that hangs, for ever."""
END_WAIT_S = 3.0
"""For a call of the last look, and for all of a GPU's: the driver is busy ending the workers."""
_EXIT_WAIT_S = 0.2
_FIRST_CALL_S = 0.05
"""So often it is looked whether the sampler has come to its first call, of which no line tells."""

_decoder = msgspec.json.Decoder(tuple[str, GpuEvent])


class Monitor:
    """Telemetry of the GPUs of one run. The supervisor's loop calls it, and never waits for it."""

    def __init__(
        self,
        uuids: Mapping[str, str],
        directory: Path | None,
        interval_s: float,
        say: Callable[[str], None],
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`uuids`: worker -> its GPU or MIG instance. `directory`: where the events are kept; None:
        only in `records`. `say` gets the lines for a person."""
        self.records = {worker: Record() for worker in uuids}
        self._uuids = dict(uuids)
        self._directory = directory
        self._interval_s = interval_s
        self._say = say
        # How long the sampler may be silent.
        self._silence_s = deadline_s + interval_s
        self._sampler: NvmlChild | None = None
        self.pid: int | None = None
        self.fd: int | None = None
        """What to read from when it is readable, until `close`; None: there is no sampler."""
        self.silent: str | None = None
        """The worker that the call was about which never returned, or in which the driver broke."""
        self._files: dict[str, AppendFile] = {}
        self._last_heard = 0.0
        self._has_spoken = False
        self._finish_asked_at: float | None = None
        self._is_over = True

    @property
    def healths(self) -> dict[str, Health | None]:
        """The figures of each worker's GPU so far; None: nothing was reported of it."""
        return {worker: record.health() for worker, record in self.records.items()}

    @property
    def due(self) -> float:
        """When `tick` has something to do, monotonic seconds."""
        return float("inf") if self._is_over else self._last_heard + self._silence_s

    @property
    def _starts_by(self) -> float:
        """No driver keeps a sampler waiting that starts, slowly on a busy machine; 0: it has."""
        return 0.0 if self._has_spoken else self._last_heard + self._silence_s

    def start(self, now: float) -> None:
        """Start the sampler. From the main thread: its death would take the sampler along."""
        for worker, uuid in self._uuids.items():
            if self._directory is not None:
                path = telemetry_path(self._directory, worker)
                self._files[worker] = AppendFile(path, self._say)
            self._keep(worker, Watched(uuid=uuid, interval_s=self._interval_s, schema=SCHEMA))
        devices = msgspec.json.encode(list(self._uuids.items())).decode()
        try:
            self._sampler = NvmlChild(
                "launcher.telemetry.sampler",
                str(self._interval_s),
                devices,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._report_end(f"its process cannot be started ({error.strerror})")
            return
        self.pid, self.fd = self._sampler.pid, self._sampler.fd
        self._is_over, self._last_heard = False, now

    def read(self, now: float) -> bool:
        """Take what there is to read; False: this was the end of it."""
        lines = self._sampler.read_lines() if self._sampler else None
        if lines is None:
            self._has_ended()
            return False
        self._last_heard, self._has_spoken = now, self._has_spoken or bool(lines)
        for line in lines:
            self._take(line)
        return True

    def tick(self, now: float) -> None:
        """Give the sampler up when it has been silent for too long in one call: the GPUs of a box
        may wake up one after the other, each in seconds."""
        call = self._sampler.in_flight() if self._sampler and now >= self.due else None
        if call:
            self._last_heard = max(self._last_heard, call.began)
        if now >= self.due:
            self._give_up(f"NVML was silent for {self._silence_s:g} s")

    def forgive_silence(self, now: float) -> None:
        """The machine was paused until now: the sampler gets its whole time again."""
        self._last_heard = max(self._last_heard, now)

    def finish(self) -> None:
        """The workers are asked to end: have the sampler take its last look. Does not wait."""
        self._finish_asked_at = self._finish_asked_at or time.monotonic()
        if self._sampler:
            self._sampler.ask_to_end()

    def close(self, wait_s: float = END_WAIT_S, end: float = float("inf")) -> None:
        """Take the last look, if each call takes at most `wait_s`, and all of them so long for
        each GPU, or until `end` (monotonic seconds); let everything go."""
        self.finish()
        asked_at = self._finish_asked_at or 0.0
        end = min(end, max(asked_at, self._starts_by) + wait_s * len(self._uuids))
        while self._sampler and not self._is_over:
            call = self._sampler.in_flight()
            since = call.began if call else self._starts_by
            until = min(end, max(asked_at, since) + wait_s)
            look_at = until if self._has_spoken else min(until, time.monotonic() + _FIRST_CALL_S)
            if self._sampler.is_readable(look_at - time.monotonic()):
                self.read(self._last_heard)
            elif time.monotonic() >= (until if self._sampler.in_flight() == call else end):
                self._give_up(f"there was no last look within {time.monotonic() - asked_at:.1f} s")
        if self._sampler:
            self._sampler.close(_EXIT_WAIT_S)
            self._sampler = None
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _take(self, line: bytes) -> None:
        try:
            worker, event = _decoder.decode(line)
        except msgspec.DecodeError as error:
            if not self._is_over:
                self._give_up(f"its process wrote what is no event ({error})")
            return
        for name in [worker] if worker else list(self._uuids):
            self._keep(name, event)
        match event:
            # The first of its number only: it may repeat for ever.
            case Xid() if self.records[worker].xids[event.xid] == 1:
                self._say(f"{worker}: {xid_symptom(event.xid)}")
            case Trouble():
                self._say(f"{worker or 'NVML'}: {trouble_symptom(worker, event)}")

    def _keep(self, worker: str, event: GpuEvent) -> None:
        self.records[worker].record(event)
        if worker in self._files:
            self._files[worker].write(encode(event))

    def _has_ended(self) -> None:
        """The sampler closed its output. It should do so only when all GPUs are lost, or after the
        last look; a driver that crashes it in its last look leaves the end of the run unknown."""
        is_expected = all(record.is_lost for record in self.records.values())
        if self._sampler and self._finish_asked_at is not None:
            is_expected = is_expected or not self._sampler.wait(_EXIT_WAIT_S)
        if not self._is_over and not is_expected:
            self._report_end("its process ended")
        self._is_over = True

    def _give_up(self, why: str) -> None:
        self._report_end(why)
        self._is_over = True
        if self._sampler:
            self._sampler.kill()

    def _report_end(self, why: str) -> None:
        """One line, and the record of every GPU without its last look, say that telemetry ends. So
        does that of the GPU that the call was about: what it told before is not all."""
        call = self._sampler.in_flight() if self._sampler else None
        if call:
            why += f" ({call.name} did not return; see `dmesg | grep -i nvrm`)"
            self.silent = call.name.partition(" on ")[2] or None
        unknown = [
            worker
            for worker in self._uuids
            if worker == self.silent or not self._has_last_look(worker)
        ]
        if not unknown:
            return
        goes_on = "; the run goes on" if self._finish_asked_at is None else ""
        self._say(f"no more telemetry: {why}{goes_on}")
        name = call.name if call else "telemetry"
        trouble = Trouble(t=time.monotonic_ns(), call=name, text=why, lost=True)
        for worker in unknown:
            self._keep(worker, trouble)

    def _has_last_look(self, worker: str) -> bool:
        """Whether its counters were read after the end of the workers was asked for."""
        counters, asked_at = self.records[worker].counters, self._finish_asked_at
        return bool(counters and asked_at is not None and counters.t / 1e9 >= asked_at)


def look(
    uuids: Mapping[str, str], deadline_s: float = DEADLINE_S, most_s: float = float("inf")
) -> dict[str, Record]:
    """What NVML reports of these GPUs (label -> UUID) at this moment, in records of one sample. A
    GPU about which NVML is silent for `deadline_s`, or breaks, is given up, and those that were not
    sampled are asked again without it, all within `most_s`. What went wrong is in the records;
    nothing is raised."""
    end = time.monotonic() + most_s
    records, left = {label: Record() for label in uuids}, dict(uuids)
    while left and time.monotonic() < end:
        monitor = Monitor(left, None, 0.0, lambda _: None)
        monitor.start(time.monotonic())
        monitor.close(deadline_s, end)
        records |= monitor.records
        left = {} if monitor.silent is None else _not_sampled(left, monitor)
    for label in left:
        text = f"no time was left to sample it within {most_s:.0f} s"
        records[label].record(
            Trouble(t=time.monotonic_ns(), call="telemetry", text=text, lost=True)
        )
    return records


def _not_sampled(uuids: Mapping[str, str], monitor: Monitor) -> dict[str, str]:
    return {
        label: uuid
        for label, uuid in uuids.items()
        if label != monitor.silent and monitor.records[label].sample is None
    }
