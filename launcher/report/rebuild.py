"""`report RUN_DIR ...`: the reports of finished runs, made again from what the runs left behind."""

import heapq
import os
from argparse import Namespace
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
from launcher.report.comparison import begun, comparison_lines, read_comparison, what_is_left
from launcher.report.conclude import conclude, held_against_golden, write
from launcher.report.files import content_of, lines_of
from launcher.report.golden import (
    Finished,
    golden_of,
    read_golden,
    settings_of,
    what_was_written,
    write_golden,
)
from launcher.report.rounds import Rounds, rounds_lines, write_rounds
from launcher.telemetry.health import Record
from launcher.verdict.comparison import ComparisonRecord
from launcher.verdict.golden import ENOUGH_WORKERS, Golden
from launcher.verdict.golden_watch import GoldenWatch
from launcher.verdict.health import Health
from launcher.verdict.live import Watch
from launcher.verdict.past import isolated
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from model_check.config.arguments import Parser
from model_check.errors import EXIT_INTERNAL, EXIT_UNNAMED, StorageError, UsageError
from model_check.events import Event, decode, decode_gpu
from model_check.utils.project_files import COMMAND
from model_check.utils.requests import request_of
from model_check.utils.words import listed

_ABOUT = """\
Make the reports of finished runs again from what they left behind, and print
them. Ends with the exit code of the first run that did not pass.
"""
_HELP = """
examples:
  bash run.sh report .logs/latest
  bash run.sh report /tmp/model_check_logs_*
  bash run.sh report .logs/latest --write-golden h100.json
  bash run.sh report .logs/latest --golden h100.json
"""


def parser() -> Parser:
    prog = f"{COMMAND} report"
    usage = f"{prog} RUN_DIR ... [--golden FILE | --write-golden FILE]"
    parser = Parser(prog=prog, usage=usage, description=_ABOUT, epilog=_HELP)
    add = parser.add_argument
    add("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help=".logs/latest is the newest")
    against = "hold the bits and the speed of every worker against this file"
    add("--golden", type=Path, metavar="FILE", help=against)
    wanted = f"make that file of a run that passed, where {ENOUGH_WORKERS} or more workers agreed"
    add("--write-golden", type=Path, metavar="FILE", help=wanted)
    add("--force", action="store_true", help="write it of any run; it will say what was missing")
    return parser


def rebuild(argv: Sequence[str], say: Callable[[str], None]) -> int:
    """Rebuild each run's report and print it. Returns the first exit code that is not 0.

    Raises UsageError for a directory that holds no run of ours, or one that is still going, for a
    golden file that cannot be read, or a run that none can be made of; StorageError.
    """
    names = parser().read(argv)
    _refuse_options(names)
    golden = None if names.golden is None else read_golden(names.golden)
    runs = [_again(each, golden, names.golden) for each in names.run_dirs]
    new = _golden_of(runs[0], names) if names.write_golden is not None else None
    for run in runs:
        try:
            run.write()
        # The directory is another user's, or an archive: the verdict stands.
        except StorageError as error:
            say(f"[launcher] no report: {error}")
        for line in run.lines:
            say(f"[launcher] {line}")
    if new is not None:
        write_golden(names.write_golden, new)
        say(f"[launcher] {what_was_written(names.write_golden, new)}")
    return next((run.exit_code for run in runs if run.exit_code), 0)


class Rebuilt(NamedTuple):
    """A report that is made again, and not written yet."""

    exit_code: int
    lines: Sequence[str]
    """That end the run."""
    last: Finished | None
    """The run, or the last of its rounds or restarts; of a comparison none."""
    write: Callable[[], None]
    """Raises StorageError."""


def _again(directory: Path, golden: Golden | None, golden_file: Path | None) -> Rebuilt:
    """Raises UsageError."""
    if run_dir.is_comparison(directory):
        return _comparison_again(directory, golden, golden_file)
    if paths := run_dir.rounds_in(directory):
        return _rounds_again(directory, paths, golden, golden_file)
    attempts = [directory, *run_dir.restarts_in(directory)]
    runs = [_rebuilt(path, golden, golden_file) for path in attempts]
    lines: list[str] = []
    for number, run in enumerate(runs):
        lines += [f"restart {number}:"] if number else []
        lines += closing_lines(run.judgement, run.directory, tail_lines=0)
    last = runs[-1]
    return Rebuilt(last.judgement.result.exit_code, lines, last, partial(_write, runs))


def _rounds_again(
    directory: Path, paths: Sequence[Path], golden: Golden | None, golden_file: Path | None
) -> Rebuilt:
    """Of those that began. Raises UsageError."""
    begun = [path for path in paths if (path / "run.json").exists()]
    if not begun:
        raise UsageError(f"{directory}: none of its rounds has begun")
    runs, rounds = [_rebuilt(path, golden, golden_file) for path in begun], Rounds()
    for run in runs:
        rounds.take(run.directory, run.judgement.result)
    result = rounds.result

    def write_all() -> None:
        _write(runs)
        write_rounds(result, directory)

    lines = list(rounds_lines(result, directory))
    return Rebuilt(result.exit_code, lines, runs[-1], write_all)


def _comparison_again(directory: Path, golden: Golden | None, golden_file: Path | None) -> Rebuilt:
    """Of the trainings that began. Raises UsageError."""
    record = read_comparison(directory)
    paths = begun(record, directory)
    if is_running(record):
        raise _still_going(directory, record)
    runs = [_rebuilt(path, golden, golden_file) for path in paths]
    known = {
        str(path.relative_to(directory)): run.judgement.result
        for path, run in zip(paths, runs, strict=True)
    }
    left = what_is_left(record, directory, known)

    def write_all() -> None:
        _write(runs)
        left.write(directory)

    lines = list(comparison_lines(left.result, directory))
    return Rebuilt(left.result.exit_code, lines, None, write_all)


def _still_going(directory: Path, record: RunRecord | ComparisonRecord) -> UsageError:
    return UsageError(f"{directory}: this run is still going (launcher pid {record.pid})")


def _write(runs: Sequence[Finished]) -> None:
    """Raises StorageError."""
    for run in runs:
        write(run.judgement.result, run.record, run.watch, run.directory)


def _golden_of(run: Rebuilt, names: Namespace) -> Golden:
    """Raises UsageError where none can be made of it."""
    if run.last is None:
        raise UsageError("report: --write-golden takes one training of a comparison")
    return golden_of(run.last, force=names.force)


def _refuse_options(names: Namespace) -> None:
    """Raises UsageError for what does not go together."""
    if not names.run_dirs:
        raise UsageError("report: give one run directory or more (.logs/latest is the newest)")
    if names.golden is not None and names.write_golden is not None:
        raise UsageError("report: --golden and --write-golden: give one of them")
    if names.write_golden is not None and len(names.run_dirs) > 1:
        raise UsageError("report: --write-golden takes one run directory")
    if names.force and names.write_golden is None:
        raise UsageError("report: --force goes with --write-golden FILE")


def watched_again(record: RunRecord, directory: Path, golden: GoldenWatch | None = None) -> Watch:
    """The run as it was watched. Raises UsageError."""
    goes_on = record.on_suspect == "continue"
    # Nobody is there to obey.
    watch = Watch(record.groups, max_lead=1, goes_on=goes_on, golden=golden)
    told = (_told_by(name, directory) for name in record.groups)
    for _, name, event in heapq.merge(*told, key=itemgetter(0)):
        watch.on_event(name, event)
    watch.finish()
    return watch


def _rebuilt(directory: Path, golden: Golden | None, file: Path | None) -> Finished:
    record, held = read_record(directory), None
    if golden is not None:
        held = GoldenWatch(golden, str(file), record.groups, settings_of(directory))
    watch = watched_again(record, directory, held)
    record = held_against_golden(as_it_ended(record, directory, watch), watch)
    judgement = conclude(record, watch, directory.absolute(), run_dir.kept)
    judgement = isolated(judgement, record.earlier_faults or {})
    return Finished(directory, judgement, record, watch)


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
    if run_dir.is_comparison(directory):
        raise UsageError(f"{directory}: a comparison: give one training of it, a directory below")
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
    if record.golden and workers != {each.name for each in record.golden.workers}:
        raise ValueError("`golden` names other workers than `workers`")
    if strangers := end.workers - {worker.name for worker in ended}:
        raise ValueError(f"`end` names {listed(sorted(strangers))}, who is not in `ended`")


def _cut_short(record: RunRecord, directory: Path, watch: Watch) -> RunRecord:
    """The launcher itself was killed: what its workers said is all there is. Raises UsageError when
    it lives."""
    if is_running(record):
        raise _still_going(directory, record)
    differs = watch.disagreements or any(h.broken for h in watch.histories.values())
    end = RunEnd(
        exit_code=EXIT_UNNAMED if differs else EXIT_INTERNAL,  # the verdict says who
        reason="the launcher did not live to see the end",
        disagreement=next(iter(watch.disagreements), None),
        further=tuple(watch.disagreements[1:]),
    )
    ended = tuple(_by_its_word(name, watch) for name in record.groups)
    return replace(record, end=end, ended=ended)


def is_running(record: RunRecord | ComparisonRecord) -> bool:
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
