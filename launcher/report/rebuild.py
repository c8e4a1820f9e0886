"""`report RUN_DIR ...`: the reports of finished runs, made again from what the runs left behind."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from launcher import run_dir
from launcher.report import evidence, files
from launcher.report.closing import closing_lines
from launcher.telemetry.health import Record
from launcher.telemetry.health_result import Healths, with_health
from launcher.verdict.health import Health
from launcher.verdict.judge import judge
from launcher.verdict.live import Watch
from launcher.verdict.results import Case, RunEnd, RunResult, WorkerEnd
from launcher.verdict.steps import History
from model_check.config.schema import FAIL_ON
from model_check.errors import EXIT_INTERNAL, StorageError, UsageError
from model_check.events import decode, decode_gpu
from model_check.utils.requests import request_of

USAGE = """\
usage: run.sh report RUN_DIR ...: make the reports again and print them; ends with the exit code of
the first run that did not pass"""
T = TypeVar("T")


def rebuild(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Rebuild each run's report and print it. Returns the first exit code that is not 0.

    Raises UsageError for a directory that holds no run of ours, or one that is still going.
    """
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"report: give one run directory or more ({USAGE})")
    results = [(Path(name), _rebuilt(Path(name))) for name in argv]
    for directory, result in results:
        try:
            files.write(result, directory)
        except StorageError as error:  # of somebody else, or an archive: the verdict stands
            write(f"[launcher] no report: {error}")
        for line in closing_lines(result, directory, tail_lines=0):
            write(f"[launcher] {line}")
    return next((result.exit_code for _, result in results if result.exit_code), 0)


def _rebuilt(directory: Path) -> RunResult:
    run = _read_run(directory)
    del run["schema"]  # the report has its own
    watch = Watch(run["groups"])
    for name in run["groups"]:
        for event in _lines(directory / f"{name.lower()}.events.jsonl", decode):
            watch.on_event(name, event)
    watch.finish()
    evidence.find(watch.histories, directory.absolute())
    end, ended = _read_end(directory, run, watch)
    healths = _read_healths(directory, run)
    histories = {worker.name: watch.histories.get(worker.name, History()) for worker in ended}
    result = judge(Case(run, end, ended, histories, watch.agreed_steps))
    return with_health(result, healths, run.get("fail_on", FAIL_ON))


def _read_healths(directory: Path, run: dict[str, Any]) -> Healths:
    """As the run knew them at its end. A telemetry file may be gone or cut since then: it speaks
    only for a run whose launcher was killed."""
    try:
        if "healths" in run:
            types = dict[str, Health | None]
            return msgspec.convert(run.pop("healths"), types, str_keys=True)
    except msgspec.ValidationError as error:
        raise _not_ours(directory, error) from error
    if run.get("telemetry_interval_s") == 0:
        return {}
    return {name: _heard(run_dir.telemetry_path(directory, name)) for name in run.get("gpus", {})}


def _heard(path: Path) -> Health | None:
    record = Record()
    for event in _lines(path, decode_gpu):
        record.record(event)
    return record.health()


def _read_end(directory: Path, run: dict[str, Any], watch: Watch) -> tuple[RunEnd, list[WorkerEnd]]:
    try:
        if "end" in run:
            return (
                msgspec.convert(run.pop("end"), RunEnd),
                msgspec.convert(run.pop("ended"), list[WorkerEnd]),
            )
    except (KeyError, msgspec.ValidationError) as error:
        raise _not_ours(directory, error) from error
    if _is_running(run):
        raise UsageError(f"{directory}: this run is still going (launcher pid {run['pid']})")
    # The supervisor itself was killed: what its workers said is all there is.
    end = RunEnd(
        exit_code=EXIT_INTERNAL,
        reason="the launcher did not live to see the end",
        disagreement=watch.disagreement,
    )
    return end, [_by_its_word(name, watch.histories[name]) for name in run["groups"]]


def _not_ours(directory: Path, error: Exception) -> UsageError:
    return UsageError(f"{directory / 'run.json'}: not as we wrote it: {error}")


def _is_running(run: dict[str, Any]) -> bool:
    """Whether the launcher that wrote it lives: on this host, under this pid, as a launcher."""
    try:
        command = Path(f"/proc/{int(run['pid'])}/cmdline").read_bytes()
    except (OSError, KeyError, ValueError):
        return False
    return run.get("host") == os.uname().nodename and b"launcher" in command


def _by_its_word(name: str, history: History) -> WorkerEnd:
    code = history.done.exit_code if history.done else None
    stopped = code is not None and request_of(code) is not None
    return WorkerEnd(name=name, pid=0, returncode=code, stopped_by_us=stopped, duration_s=0.0)


def _read_run(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    try:
        run: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UsageError(f"{path}: not a run directory: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: not a run of ours: {error}") from error
    if run.get("schema") != 1 or not isinstance(run.get("groups"), dict):
        raise UsageError(f"{path}: written by another version (schema {run.get('schema')!r})")
    return run


def _lines(path: Path, decode: Callable[[bytes], T]) -> Iterator[T]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield decode(line)
        except msgspec.DecodeError:
            continue  # the last line of a run that was cut short
