"""Many runs -> fleet.json, fleet.html, and lines on the terminal."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.fleet.drain import drain_lines
from launcher.report.fleet.found import Search, parts
from launcher.report.fleet.prometheus import prometheus_text
from launcher.report.fleet.reading import Again, Reader, events_of
from launcher.report.golden import settings_of
from launcher.report.page.fleet import fleet_page
from launcher.verdict.fleet import FleetInput, FleetResult, Place
from launcher.verdict.fleet_merge import merged
from launcher.verdict.results import Verdict
from launcher.verdict.severity import Repeat
from model_check.errors import StorageError
from model_check.events import Event, readable
from model_check.utils.files import check_replaceable, write_atomic

MakeAgain = Callable[[Path], Again]


def fleet_of(
    given: Sequence[Path], output: Path | None, again: MakeAgain
) -> tuple[FleetResult, Path]:
    """The merge of all runs that are found there, and the directory of its report: `output`, else
    the directory that holds them, if one was given, else the current one."""
    search = Search(given)
    place = Path(output or search.holder or ".").absolute()
    reader = Reader(place, again)
    runs, notes = _each_once([reader.read(found) for found in search.found])
    return _merge(runs, [*search.notes, *notes]), place


def fleet_of_one(
    directory: Path, verdict: Verdict, exit_code: int, again: MakeAgain
) -> FleetResult:
    """The same of one run, for what is told of a fleet. `verdict`, `exit_code`: the run's own."""
    reader = Reader(Path.cwd(), again)
    found = parts(directory, [path.name for path in directory.iterdir()])
    result = _merge([reader.read(each) for each in found], [], is_fleet=False)
    return replace(result, verdict=verdict, exit_code=exit_code)


def write_fleet(result: FleetResult, output: Path) -> None:
    """fleet.json and fleet.html, each whole or not at all. Raises StorageError."""
    documents = {"fleet.json": msgspec.to_builtins(result), "fleet.html": fleet_page(result)}
    for name, document in documents.items():
        try:
            run_dir.write(output / name, document)
        except StorageError as error:
            why = getattr(error.__cause__, "strerror", None) or error.__cause__ or error
            raise StorageError(f"{output / name}: cannot be written: {why}") from error


def write_prometheus(result: FleetResult, path: Path) -> None:
    """Whole or not at all: the collector may read at any moment. Raises StorageError."""
    try:
        check_replaceable(path)
        write_atomic(path, readable(prometheus_text(result, time.time())))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error


def drain_script(result: FleetResult) -> str:
    return "\n".join(drain_lines(result))


def _merge(
    runs: Sequence[FleetInput], notes: Sequence[str], *, is_fleet: bool = True
) -> FleetResult:
    directories = [Path(each.path) for each in runs]

    def load(place: Place) -> Iterable[Event]:
        number, worker = place
        return events_of(directories[number], worker)

    def settings(number: int) -> dict[str, Any]:
        return settings_of(directories[number])

    return merged(runs, load, settings, notes, is_fleet=is_fleet)


def _each_once(runs: Sequence[FleetInput]) -> tuple[list[FleetInput], list[str]]:
    """A run that was given twice, or copied, counts once: by the copy that knows most of it."""
    copies: dict[tuple[Any, ...], list[FleetInput]] = {}
    for each in runs:
        copies.setdefault(_identity(each), []).append(each)
    kept, notes = [], []
    for same in copies.values():
        best = max(same, key=_known)
        kept.append(best)
        notes += [
            f"{each.directory}: the same run as {best.directory}: counts once"
            for each in same
            if each is not best
        ]
    return kept, notes


def _identity(run: FleetInput) -> tuple[Any, ...]:
    """The same for a copy of this run."""
    if (record := run.record) is None:
        return (os.path.realpath(run.path),)
    return record.host, record.pid, record.started_ns, record.started_at


def _known(run: FleetInput) -> tuple[bool, bool]:
    """What a copy that was made too early lacks: the end of the run, and its replay."""
    told = {worker.repeat for worker in run.workers}
    return not run.is_dead, bool(told - {None, Repeat.NOT_REPLAYED})
