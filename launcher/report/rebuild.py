"""`report RUN_DIR ...`: the reports of finished runs, made again from what the runs left behind."""

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.closing import closing_lines
from launcher.report.conclude import conclude, write
from launcher.report.files import content_of, lines_of
from launcher.report.rounds import Rounds, rounds_lines, write_rounds
from launcher.telemetry.health import Record
from launcher.verdict.health import Health
from launcher.verdict.live import Watch
from launcher.verdict.past import isolated
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from launcher.verdict.results import Judgement
from model_check.errors import EXIT_INTERNAL, EXIT_UNNAMED, StorageError, UsageError
from model_check.events import Event, decode, decode_gpu
from model_check.utils.requests import request_of
from model_check.utils.words import listed

USAGE = """\
usage: run.sh report RUN_DIR ...

Make the reports of finished runs again from what they left behind, and print
them. Ends with the exit code of the first run that did not pass.

examples:
  bash run.sh report .logs/latest
  bash run.sh report /tmp/model_check_logs_*"""


def rebuild(argv: Sequence[str], say: Callable[[str], None]) -> int:
    """Rebuild each run's report and print it. Returns the first exit code that is not 0.

    Raises UsageError for a directory that holds no run of ours, or one that is still going.
    """
    if option := next((word for word in argv if word.startswith("-")), None):
        raise UsageError(f"report: {option}: no such option (report.json is for machines)")
    if not argv:
        raise UsageError("report: give one run directory or more (.logs/latest is the newest)")
    runs = [_again(Path(name)) for name in argv]
    for run in runs:
        try:
            run.write()
        # The directory is another user's, or an archive: the verdict stands.
        except StorageError as error:
            say(f"[launcher] no report: {error}")
        for line in run.lines:
            say(f"[launcher] {line}")
    return next((run.exit_code for run in runs if run.exit_code), 0)


class Rebuilt(NamedTuple):
    """A report that is made again, and not written yet."""

    exit_code: int
    lines: Sequence[str]
    """That end the run."""
    write: Callable[[], None]
    """Raises StorageError."""


def _again(directory: Path) -> Rebuilt:
    """Raises UsageError."""
    if paths := run_dir.rounds_in(directory):
        return _rounds_again(directory, paths)
    judgement, record, watch = _rebuilt(directory)
    lines = list(closing_lines(judgement, directory, tail_lines=0))
    result = judgement.result
    return Rebuilt(result.exit_code, lines, partial(write, result, record, watch, directory))


def _rounds_again(directory: Path, paths: Sequence[Path]) -> Rebuilt:
    """Of those that began. Raises UsageError."""
    rounds, writes = Rounds(), list[Callable[[], None]]()
    for path in (path for path in paths if (path / "run.json").exists()):
        judgement, record, watch = _rebuilt(path)
        rounds.take(path, judgement.result)
        writes.append(partial(write, judgement.result, record, watch, path))
    if not writes:
        raise UsageError(f"{directory}: none of its rounds has begun")
    result = rounds.result
    writes.append(partial(write_rounds, result, directory))
    lines = list(rounds_lines(result, directory))

    def write_all() -> None:
        for each in writes:
            each()

    return Rebuilt(result.exit_code, lines, write_all)


def watched_again(record: RunRecord, directory: Path) -> Watch:
    """The run as it was watched. Raises UsageError."""
    # Nobody is there to obey.
    watch = Watch(record.groups, max_lead=1, goes_on=record.on_suspect == "continue")
    told = (_told_by(name, directory) for name in record.groups)
    for _, name, event in heapq.merge(*told, key=itemgetter(0)):
        watch.on_event(name, event)
    watch.finish()
    return watch


def _rebuilt(directory: Path) -> tuple[Judgement, RunRecord, Watch]:
    record = read_record(directory)
    watch = watched_again(record, directory)
    record = as_it_ended(record, directory, watch)
    judgement = conclude(record, watch, directory.absolute(), run_dir.kept)
    return isolated(judgement, record.earlier_faults or {}), record, watch


def as_it_ended(record: RunRecord, directory: Path, watch: Watch) -> RunRecord:
    """With what a launcher that was killed could not write. Raises UsageError for a run that is
    still going."""
    if record.end is None:
        record = _cut_short(record, directory, watch)
    if record.healths is None:
        record = replace(record, healths=_read_healths(record, directory))
    return record


def _told_by(name: str, directory: Path) -> Iterator[tuple[int, str, Event]]:
    """(time, worker, event): together with the others' they are the run as it was watched."""
    for event in lines_of(directory / f"{name.lower()}.events.jsonl", decode):
        yield event.t, name, event


def read_record(directory: Path) -> RunRecord:
    """run.json. Raises UsageError where there is none, or none of ours."""
    path = directory / "run.json"
    if rounds := run_dir.rounds_in(directory):
        raise UsageError(f"{directory}: a run of {len(rounds)} rounds: give one, as {rounds[-1]}")
    try:
        document = msgspec.json.decode(content_of(path), type=dict[str, Any])
        if (schema := document.get("schema")) != run_dir.SCHEMA:
            raise UsageError(f"{path}: written by another version (schema {schema!r})")
        record = msgspec.convert(document, RunRecord, str_keys=True)
        _refuse_contradictions(record)
    except OSError as error:
        raise UsageError(f"{path}: not a run directory: {error.strerror}") from error
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: damaged, or not a run of ours: {error}") from error
    return record


def _refuse_contradictions(record: RunRecord) -> None:
    """Raises ValueError."""
    workers, end, ended = {*record.workers}, record.end, record.ended
    if not workers or workers != record.groups.keys():
        raise ValueError("`workers` and `groups` name different workers, or none")
    if end is None and ended is None:
        return
    if end is None or ended is None:
        raise ValueError("it needs `end` and `ended`, or neither")
    if strangers := end.workers - {worker.name for worker in ended}:
        raise ValueError(f"`end` names {listed(sorted(strangers))}, who is not in `ended`")


def _cut_short(record: RunRecord, directory: Path, watch: Watch) -> RunRecord:
    """The launcher itself was killed: what its workers said is all there is. Raises UsageError when
    it lives."""
    if is_running(record):
        raise UsageError(f"{directory}: this run is still going (launcher pid {record.pid})")
    differs = watch.disagreements or any(h.broken for h in watch.histories.values())
    end = RunEnd(
        exit_code=EXIT_UNNAMED if differs else EXIT_INTERNAL,  # the verdict says who
        reason="the launcher did not live to see the end",
        disagreement=next(iter(watch.disagreements), None),
        further=tuple(watch.disagreements[1:]),
    )
    ended = tuple(_by_its_word(name, watch) for name in record.groups)
    return replace(record, end=end, ended=ended)


def is_running(record: RunRecord) -> bool:
    """Whether the launcher that wrote it lives: on this host, under this pid, as a launcher."""
    with suppress(OSError):
        command = Path(f"/proc/{record.pid}/cmdline").read_bytes()
        return record.host == os.uname().nodename and b"launcher" in command
    return False


def _by_its_word(name: str, watch: Watch) -> WorkerEnd:
    done, curves = watch.histories[name].done, watch.curves[name]
    code = done.exit_code if done else None
    stopped = code is not None and request_of(code) is not None
    told_s = (curves.last_ns - curves.first_ns) / 1e9
    return WorkerEnd(name=name, pid=0, returncode=code, stopped_by_us=stopped, duration_s=told_s)


def _read_healths(record: RunRecord, directory: Path) -> dict[str, Health | None]:
    """From the telemetry files, which may be gone or cut since then: they speak for a run whose
    launcher was killed, or is older than the `healths` of run.json."""
    if record.telemetry_interval_s == 0:
        return {}
    return {name: _heard(run_dir.telemetry_path(directory, name)) for name in record.gpus}


def _heard(path: Path) -> Health | None:
    record = Record()
    for event in lines_of(path, decode_gpu):
        record.record(event)
    return record.health()
