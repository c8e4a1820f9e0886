"""What a GPU did in earlier runs, and what follows from it for a run that is over. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.severity import CauseClass, Repeat, Severity, Symptom

SCHEMA = 1
FORGOTTEN = "FORGOTTEN"
"""In place of a verdict: what came before counts no more, for the cause that the line tells."""


class PastRun(Struct, frozen=True, kw_only=True):
    """One worker of one run: a line of the history."""

    schema: int = SCHEMA
    time: str
    """When the run was over: ISO 8601, with the zone."""
    host: str
    worker: str
    uuid: str | None
    """Of its GPU, as the next three; null: a CPU worker, or not told."""
    pci_bus_id: str | None
    serial: str | None
    model: str | None
    verdict: str
    exit_code: int
    """Of the run."""
    cause: str | None
    cause_class: str | None
    severity: str | None
    repeat: str | None
    steps: int
    run_dir: str | None
    is_drill: bool
    """A fault was injected into the run."""

    @property
    def device(self) -> str | None:
        return self.uuid or self.serial


def device_of(gpu: Mapping[str, Any]) -> str | None:
    """What has a history: a GPU as NVML described it, wherever it is plugged in. None: a CPU
    worker's number tells of no device."""
    return gpu.get("uuid") or gpu.get("serial")


TRANSIENT = (CauseClass.HARDWARE, Repeat.TRANSIENT)
"""Class and repeat of a fault of which the hardware computed other bits, or a NaN, and not when it
computed the same again."""


def is_transient(run: PastRun) -> bool:
    return (run.cause_class, run.repeat) == TRANSIENT


class EarlierFaults(Struct, frozen=True):
    """The transient faults that the history holds of a worker that has just had another one."""

    count: int
    first_time: str
    first_run_dir: str | None

    def __str__(self) -> str:
        time = "the second time" if self.count == 1 else f"{self.count + 1} times now"
        return f"{time}: first {self.first_time[:16].replace('T', ' ')}, {self.first_run_dir}"


def past_runs(result: RunResult, now: datetime) -> list[PastRun]:
    """What the history keeps of a run that was over at `now`."""
    return [
        _past_run(result, worker, now.isoformat(timespec="seconds")) for worker in result.workers
    ]


def forgotten(run: PastRun, because: str, now: datetime) -> PastRun:
    """The line by which the history of the GPU of `run` counts no more."""
    return replace(
        run,
        time=now.isoformat(timespec="seconds"),
        verdict=FORGOTTEN,
        cause=because,
        **dict.fromkeys(("cause_class", "severity", "repeat", "run_dir")),
        exit_code=0,
        steps=0,
        is_drill=False,
    )


def _past_run(result: RunResult, worker: WorkerResult, time: str) -> PastRun:
    gpu = worker.gpu or {}
    return PastRun(
        time=time,
        host=result.run["host"],
        worker=worker.name,
        uuid=gpu.get("uuid"),
        pci_bus_id=gpu.get("pci_bus_id"),
        serial=gpu.get("serial"),
        model=gpu.get("name"),
        verdict=worker.verdict,
        exit_code=result.exit_code,
        cause=worker.cause,
        cause_class=worker.cause_class,
        severity=worker.severity,
        repeat=worker.repeat,
        steps=worker.steps,
        run_dir=result.run.get("run_dir"),
        is_drill=result.run.get("drill") is not None,
    )


def earlier_faults(
    workers: Mapping[str, str], past: Iterable[PastRun], *, is_drill: bool, run_dir: str | None
) -> dict[str, EarlierFaults]:
    """Of the workers that have had a transient fault in a run: those whose devices had some before.
    Drills have a history of their own. Of a run that was replayed later, the last line counts.

    `workers`: device -> its worker; `past`: the oldest first; `run_dir`: of the run itself.
    """
    latest: dict[str, dict[str, PastRun]] = {}
    for run in past:
        worker = workers.get(run.device or "")
        if worker is None or run.is_drill != is_drill:
            continue
        if run.verdict == FORGOTTEN:
            latest.pop(worker, None)
        elif run.run_dir != run_dir:
            latest.setdefault(worker, {})[run.run_dir or run.time] = run
    found: dict[str, EarlierFaults] = {}
    for worker, runs in latest.items():
        for run in filter(is_transient, runs.values()):
            before = found.get(worker) or EarlierFaults(0, run.time, run.run_dir)
            found[worker] = replace(before, count=before.count + 1)
    return found


def against(past: Iterable[PastRun]) -> dict[str, Symptom]:
    """GPU's UUID -> what its history, the oldest first, holds against it. Two transient faults are
    ISOLATE for good, any other ISOLATE until the GPU passes a run; one transient fault is watched.
    Drills count for nothing; of a run that was replayed later, the last line counts."""
    records: dict[str, _Record] = {}
    for run in past:
        if run.uuid is not None and run.verdict == FORGOTTEN:
            records.pop(run.uuid, None)
        elif run.uuid is not None and not run.is_drill:
            records.setdefault(run.uuid, _Record()).take(run)
    symptoms = {uuid: record.symptom(uuid) for uuid, record in records.items()}
    return {uuid: symptom for uuid, symptom in symptoms.items() if symptom is not None}


class _Record(Struct):
    """What counts of one GPU's runs, in little memory."""

    transient: dict[str, PastRun] = field(default_factory=dict)
    """By the run."""
    isolated: PastRun | None = None

    def take(self, run: PastRun) -> None:
        name, isolated = run.run_dir or run.time, self.isolated
        self.transient.pop(name, None)
        if is_transient(run):
            self.transient[name] = run
        is_replayed = isolated is not None and (isolated.run_dir or isolated.time) == name
        if is_replayed or run.verdict in (Verdict.PASS, Verdict.WARN):
            self.isolated = None
        if run.severity == Severity.ISOLATE:
            self.isolated = run

    def symptom(self, uuid: str) -> Symptom | None:
        see, count = f"see `run.sh history {uuid[:12]}`", len(self.transient)
        days = [run.time[:10] for run in self.transient.values()]
        if count > 1:
            figure = f"{count} transient faults in earlier runs, first on {days[0]}"
            return Symptom(Severity.ISOLATE, figure, see)
        if (run := self.isolated) is not None:
            figure = f"ISOLATE in a run of {run.time[:10]}: {run.cause}"
            return Symptom(Severity.ISOLATE, figure, f"a run that it passes clears this; {see}")
        if count:
            figure = f"a transient fault in an earlier run, on {days[0]}"
            return Symptom(Severity.MONITOR, figure, f"a second one is ISOLATE; {see}")
        return None
