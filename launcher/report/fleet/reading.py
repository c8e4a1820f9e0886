"""A run directory -> what the merge needs of it: by its report.json, which tells all in one file;
where there is none that can be read, by the run's own files, as `report RUN_DIR` reads them."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from launcher import run_dir
from launcher.report.files import lines_of
from launcher.report.fleet.found import Found
from launcher.verdict.fleet import Device, Figures, PartRead, RunRead, WorkerRead
from launcher.verdict.golden import key_of
from launcher.verdict.results import RunResult, Verdict
from launcher.verdict.severity import CauseClass, Repeat, Severity
from launcher.verdict.trace import Trace, trace_of
from model_check.errors import EXIT_DISAGREEMENT, EXIT_PASS, EXIT_UNPROVEN, UsageError
from model_check.events import Event, Scalar, decode
from model_check.utils.held import hold_unlinked
from model_check.utils.words import first_line

_LONGEST = 1 << 26
"""Bytes of a report.json: that of 64 GPUs has 1 MB."""
Number = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
ExitCode = Annotated[int, Meta(ge=0, le=255)]
# It is part of a file's name.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
_TOLD = (Verdict.WARN, Verdict.FAIL, Verdict.SUSPECT, Verdict.INCONCLUSIVE, Verdict.INVALID)


class _Gpu(Struct):
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    serial: str | None = None


class _Health(Struct):
    temperature_max_c: Annotated[int, Meta(ge=-273, le=1000)] | None = None


class _Slow(Struct):
    ratio: float


class _Worker(Struct):
    """What is needed of a row of report.json."""

    name: Name
    verdict: Verdict
    cause: str | None
    steps: Number
    duration_s: Amount
    returncode: int | None
    tokens_per_s: Amount | None = None
    peak_memory_bytes: Number | None = None
    gpu: _Gpu | None = None
    detail: dict[str, Scalar] = field(default_factory=dict)
    telemetry: _Health | None = None
    slow: _Slow | None = None
    warnings: list[str] = []
    symptoms: list[str] = []
    cause_class: CauseClass | None = None
    severity: Severity | None = None
    repeat: Repeat | None = None
    trace: Trace | None = None


class _Part(Struct):
    """Of a job of several nodes."""

    name: str
    num_ranks: Number
    hosts: dict[str, str]
    job: str | None = None


class _Elsewhere(Struct):
    node: str
    worker: str | None = None


class _Run(Struct):
    """The same of what the run was asked for."""

    host: str
    started_at: str
    started_ns: int
    pid: int
    mode: str = "replicate"
    drill: str | None = None
    scheduler: Literal["slurm", "kubernetes"] | None = None
    node: str | None = None
    groups: dict[str, str] = field(default_factory=dict)
    not_compared: str | None = None
    part: _Part | None = None
    fail_on: list[str] | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    duration_s: Amount | None = None


class _Difference(Struct):
    step: Number
    bits: dict[str, str]


class _Standing(Struct):
    name: str
    disagreement: _Difference | None = None


class _Golden(Struct):
    """How the workers stand to a golden file."""

    workers: list[_Standing]

    def step_of(self, worker: str) -> int | None:
        found = (each.disagreement for each in self.workers if each.name == worker)
        return next((each.step for each in found if each is not None), None)


class _Report(Struct):
    verdict: Verdict
    exit_code: ExitCode
    summary: str
    culprits: list[str]
    workers: list[_Worker]
    run: _Run
    schema: int = run_dir.SCHEMA
    disagreement: _Difference | None = None
    elsewhere: _Elsewhere | None = None
    golden: _Golden | None = None

    def __post_init__(self) -> None:
        if len({worker.name for worker in self.workers}) < len(self.workers):
            raise ValueError("two workers have the same name")


class StillGoing(UsageError):
    """The launcher of the run lives."""


class Again(NamedTuple):
    """The result of a run whose report is made again."""

    result: RunResult
    has_end: bool
    """Else its launcher was killed, or it goes on elsewhere."""


class Read(NamedTuple):
    run: RunRead
    identity: tuple[Any, ...]
    """The same for a copy of this run."""


class Reader:
    def __init__(self, output: Path, again: Callable[[Path], Again]) -> None:
        """`output`: where the fleet's page will be. `again`: makes a report again; raises
        UsageError."""
        self._output = output
        self._again = again

    def read(self, found: Found) -> Read:
        """Whatever is there: of what cannot be read, why."""
        path = found.path.absolute()
        try:
            if found.problem is not None:
                raise UsageError(found.problem)
            return self._read(found.path)
        except UsageError as error:
            why = first_line(error)
            for prefix in (f"{found.path}: ", f"{found.path}/"):
                why = why.removeprefix(prefix)
            run = RunRead(
                directory=str(found.path),
                path=str(path),
                page=None,
                exit_code=EXIT_UNPROVEN,
                summary=why,
                is_dead=not isinstance(error, StillGoing),
            )
            return Read(run, (os.path.realpath(path),))

    def _read(self, directory: Path) -> Read:
        """Raises UsageError."""
        report, has_end = _report_of(directory), True
        if report is None:
            again = self._again(directory)
            report, has_end = _converted(again.result, directory), again.has_end
        run = report.run
        read = RunRead(
            directory=str(directory),
            path=str(directory.absolute()),
            page=self._page(directory),
            host=run.host,
            node=run.node,
            scheduler=run.scheduler,
            started_at=run.started_at,
            duration_s=run.duration_s,
            verdict=report.verdict,
            exit_code=report.exit_code,
            summary=report.summary if has_end else _no_end(report),
            culprits=report.culprits,
            drill=run.drill,
            fails_on_speed="speed" in (run.fail_on or ()),
            step=report.disagreement.step if report.disagreement else None,
            is_dead=not has_end,
            part=_part(report, directory),
            workers=[_worker(each, report, directory) for each in report.workers],
        )
        return Read(read, (run.host, run.pid, run.started_ns, run.started_at))

    def _page(self, directory: Path) -> str | None:
        path = directory.absolute() / "report.html"
        return os.path.relpath(path, self._output) if os.path.isfile(path) else None


def _part(report: _Report, directory: Path) -> PartRead | None:
    """Jobs of an older version have no number: those of the same nodes count as one."""
    part, ended = report.run.part, report.elsewhere
    if part is None:
        return None
    hosts = (f"{name} {host}" for name, host in part.hosts.items())
    failed_first = None
    if ended is not None and ended.worker is not None and ended.node != part.name:
        failed_first = (ended.node, ended.worker)
    return PartRead(
        job=(part.job or "", run_dir.part_name(directory), *hosts),
        name=part.name,
        failed_first=failed_first,
    )


def _no_end(report: _Report) -> str:
    """Whether a launcher lives can be told on its own machine alone."""
    if report.run.host == platform.node():
        return f"it has no end: {report.summary}"
    return f"it has no end: it was killed, or still goes on on {report.run.host}"


def events_of(directory: Path, worker: str) -> Iterator[Event]:
    """None of them where they are gone, or cannot be read."""
    with suppress(UsageError):
        yield from lines_of(directory / f"{worker.lower()}.events.jsonl", decode)


def _report_of(directory: Path) -> _Report | None:
    """None: there is none, or none that can be used: the run's own files may tell more."""
    with suppress(OSError, ValueError, RecursionError), hold_unlinked(directory) as held:
        report = msgspec.json.decode(held.read("report.json", _LONGEST), type=_Report)
        return report if report.schema == run_dir.SCHEMA else None
    return None


def _converted(result: RunResult, directory: Path) -> _Report:
    """Raises UsageError."""
    try:
        return msgspec.convert(msgspec.to_builtins(result), _Report, str_keys=True)
    except ValueError as error:
        raise UsageError(f"{directory}: damaged, or not a run of ours: {error}") from error


def _worker(worker: _Worker, report: _Report, directory: Path) -> WorkerRead:
    trace = worker.trace
    if trace is None and worker.steps:
        trace = trace_of(events_of(directory, worker.name))
    gpu = worker.gpu or _Gpu()
    told = next(filter(None, [*worker.symptoms, worker.cause, *worker.warnings]), "")
    return WorkerRead(
        name=worker.name,
        device=Device(
            name=gpu.name or _text(worker.detail.get("device_name")),
            uuid=gpu.uuid,
            pci_bus_id=gpu.pci_bus_id,
            serial=gpu.serial,
        ),
        verdict=worker.verdict,
        said=told.removeprefix(f"{worker.name}: ") if worker.verdict in _TOLD else "",
        cause_class=worker.cause_class,
        severity=worker.severity,
        repeat=worker.repeat,
        returncode=worker.returncode,
        is_odd=report.exit_code == EXIT_DISAGREEMENT and worker.name in report.culprits,
        golden_step=report.golden.step_of(worker.name) if report.golden else None,
        is_slow=worker.slow is not None,
        figures=Figures(
            steps=worker.steps,
            duration_s=worker.duration_s,
            tokens_per_s=worker.tokens_per_s,
            peak_memory_bytes=worker.peak_memory_bytes,
            temperature_max_c=worker.telemetry.temperature_max_c if worker.telemetry else None,
        ),
        trace=trace,
        key=_key(worker, report),
        why_not=_why_not(worker, report, trace),
        is_rank=_is_job(report.run),
    )


def _text(value: Scalar) -> str | None:
    return None if value is None else str(value)


def _key(worker: _Worker, report: _Report) -> Mapping[str, Scalar]:
    """That of a golden file, and what else may change bits rightly from machine to machine: the
    driver compiles kernels, ranks of a job sum what so many of them computed."""
    run = report.run
    key = key_of(run.groups.get(worker.name, worker.name), worker.detail)
    key["driver"] = run.versions.get("driver")
    key["model_check"] = run.versions.get("model_check")
    if worker.detail.get("attention_backend") == "flash_attn_2":  # a package of its own
        key["flash_attn"] = run.versions.get("flash_attn")
    if _is_job(run):
        ranks = len(report.workers) if run.part is None else run.part.num_ranks
        key |= {"mode": run.mode, "ranks": ranks}
    return key


def _is_job(run: _Run) -> bool:
    return run.mode not in ("replicate", "compare")


def _why_not(worker: _Worker, report: _Report, trace: Trace | None) -> str | None:
    if report.run.not_compared is not None:
        return report.run.not_compared
    if worker.verdict is Verdict.INVALID:
        return worker.cause or "its run calls it INVALID"
    # Ranks are compared with each other all the same: they have the same sums.
    if worker.detail.get("deterministic") is False:
        return "system.deterministic is false"
    # A run of a command of the user's own, or one that ended before its first step.
    is_training = report.exit_code == EXIT_PASS and worker.steps
    return "it told no step" if trace is None and is_training else None
