"""A run directory -> what is merged: by its report.json, which tells all in one file. Where there
is none that can be used, by the run's own files, as `report RUN_DIR` reads them."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.files import lines_of
from launcher.report.fleet.found import Found
from launcher.report.read_run import read_result
from launcher.verdict.fleet import Device, FleetInput
from launcher.verdict.record import RunRecord
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.trace import trace_of
from model_check.errors import EXIT_UNPROVEN, UsageError
from model_check.events import Event, decode
from model_check.utils.words import first_line


class StillGoing(UsageError):
    """The launcher of the run lives."""


class Again(NamedTuple):
    """The result of a run whose report is made again."""

    result: RunResult
    has_end: bool
    """Else its launcher was killed, or it goes on elsewhere."""


class Reader:
    def __init__(self, output: Path, again: Callable[[Path], Again]) -> None:
        """`output`: where the fleet's page will be. `again`: makes a report again; raises
        UsageError."""
        self._output = output
        self._again = again

    def read(self, found: Found) -> FleetInput:
        """Whatever is there: of what cannot be read, why."""
        try:
            if found.problem is not None:
                raise UsageError(found.problem)
            return self._read(found.path)
        except UsageError as error:
            why = first_line(error)
            for prefix in (f"{found.path}: ", f"{found.path}/"):
                why = why.removeprefix(prefix)
            return FleetInput(
                directory=str(found.path),
                path=str(found.path.absolute()),
                page=None,
                result=_not_read(why),
                is_dead=not isinstance(error, StillGoing),
            )

    def _read(self, directory: Path) -> FleetInput:
        """Raises UsageError."""
        with suppress(ValueError):
            if (result := read_result(directory)) is not None:
                return self._input(directory, result)
        again = self._again(directory)
        try:
            run = self._input(directory, again.result)
        except ValueError as error:
            raise UsageError(f"{directory}: damaged, or not a run of ours: {error}") from error
        if again.has_end:
            return run
        return replace(run, is_dead=True, result=replace(run.result, summary=_no_end(run)))

    def _input(self, directory: Path, result: RunResult) -> FleetInput:
        """Raises ValueError where it is damaged."""
        record = msgspec.convert(result.run, RunRecord)
        # A thousand runs are kept; the fingerprints are most of a report.
        workers = [_with_trace(worker, directory) for worker in result.workers]
        return FleetInput(
            directory=str(directory),
            path=str(directory.absolute()),
            page=self._page(directory),
            result=replace(result, workers=workers, fingerprints=[]),
            record=record,
            devices={worker.name: _device(worker) for worker in workers},
            job=_job(record, directory),
        )

    def _page(self, directory: Path) -> str | None:
        path = directory.absolute() / "report.html"
        return os.path.relpath(path, self._output) if os.path.isfile(path) else None


def _not_read(why: str) -> RunResult:
    return RunResult(
        verdict=Verdict.INCONCLUSIVE,
        exit_code=EXIT_UNPROVEN,
        summary=why,
        culprits=[],
        disagreement=None,
        workers=[],
        leftovers=[],
        dropped_lines=0,
        run={},
    )


def _no_end(run: FleetInput) -> str:
    """Whether a launcher lives can be told on its own machine alone."""
    if run.host == platform.node():
        return f"it has no end: {run.result.summary}"
    return f"it has no end: it was killed, or still goes on on {run.host}"


def events_of(directory: Path, worker: str) -> Iterator[Event]:
    """None of them where they are gone, or cannot be read."""
    with suppress(UsageError):
        yield from lines_of(directory / f"{worker.lower()}.events.jsonl", decode)


def _with_trace(worker: WorkerResult, directory: Path) -> WorkerResult:
    """Reports of an older version have none."""
    if worker.trace is not None or not worker.steps:
        return worker
    return replace(worker, trace=trace_of(events_of(directory, worker.name)))


def _device(worker: WorkerResult) -> Device:
    device = msgspec.convert(worker.gpu or {}, Device)
    name = worker.detail.get("device_name")
    return device if device.name or name is None else replace(device, name=str(name))


def _job(record: RunRecord, directory: Path) -> tuple[str, ...] | None:
    """Jobs of an older version have no number: those of the same nodes count as one."""
    if (part := record.part) is None:
        return None
    hosts = (f"{name} {host}" for name, host in part.hosts.items())
    return (part.job or "", run_dir.part_name(directory), *hosts)
