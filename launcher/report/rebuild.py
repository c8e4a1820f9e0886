"""`report RUN_DIR ...`: the report of a finished run, made again from what the run left behind; of
many runs what they show together."""

import heapq
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from launcher import run_dir
from launcher.report.closing import closing_lines
from launcher.report.comparison import begun, comparison_lines, read_comparison, what_is_left
from launcher.report.conclude import conclude, held_against_golden, write
from launcher.report.files import lines_of
from launcher.report.fleet.found import Search, is_fleet
from launcher.report.fleet.lines import fleet_lines
from launcher.report.fleet.reading import Again, StillGoing
from launcher.report.fleet.report import (
    drain_script,
    fleet_of,
    fleet_of_one,
    write_fleet,
    write_prometheus,
)
from launcher.report.golden import (
    Finished,
    golden_of,
    read_golden,
    settings_of,
    what_was_written,
    write_golden,
)
from launcher.report.read_run import is_running, read_record
from launcher.report.rounds import Rounds, rounds_lines, write_rounds
from launcher.telemetry.health import Record
from launcher.verdict.comparison import ComparisonRecord
from launcher.verdict.fleet import FleetResult
from launcher.verdict.golden import ENOUGH_WORKERS, Golden
from launcher.verdict.golden_watch import GoldenWatch
from launcher.verdict.health import Health
from launcher.verdict.live import Watch
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from launcher.verdict.results import Verdict
from model_check.config.arguments import Parser
from model_check.errors import EXIT_INTERNAL, EXIT_PASS, EXIT_UNNAMED, StorageError, UsageError
from model_check.events import Event, decode, decode_gpu
from model_check.utils.project_files import COMMAND
from model_check.utils.requests import request_of
from model_check.utils.words import Say
from model_check.utils.worker_env import telemetry_path

_ABOUT = """\
Make the report of a finished run again from what it left behind, and print it. Ends
with the run's exit code.

Of several runs, or of a directory that holds some: what they show together. Workers
of one kind, with the same software, settings, data and seed, must have the same bits
in every step, whatever machine they are in. Writes fleet.html and fleet.json. Ends with
the exit code of the gravest finding: ISOLATE before RESET, MONITOR and IGNORE; of equal
ones FAIL before SUSPECT, INCONCLUSIVE and INVALID. 0: nothing failed.
"""
_HELP = """
examples:
  bash run.sh report .logs/latest
  bash run.sh report /shared/burnin
  bash run.sh report /shared/burnin --drain > drain.sh
  bash run.sh report run1 run2 run3 --output /shared/reports
  bash run.sh report .logs/latest --prometheus /run/textfile/model_check.prom
  bash run.sh report .logs/latest --write-golden h100.json
  bash run.sh report .logs/latest --golden h100.json
"""


def _parser() -> Parser:
    usage = f"{COMMAND} report RUN_DIR ... [OPTIONS]"
    parser = Parser(usage=usage, description=_ABOUT, epilog=_HELP)
    add = parser.add_argument
    which = ".logs/latest is the newest; a directory that holds runs stands for all of them"
    add("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help=which)
    where = "where fleet.html and fleet.json go (the directory that holds the runs, else this one)"
    add("--output", type=Path, metavar="DIR", help=where)
    figures = "write verdicts and figures for node_exporter's textfile collector (*.prom)"
    add("--prometheus", type=Path, metavar="FILE", help=figures)
    commands = "print the commands that drain the nodes with a condemned GPU, and run none"
    add("--drain", action="store_true", help=f"{commands}; all else goes to standard error")
    against = "hold the bits and the speed of every worker against this file"
    add("--golden", type=Path, metavar="FILE", help=against)
    wanted = f"make that file of a run that passed, where {ENOUGH_WORKERS} or more workers agreed"
    add("--write-golden", type=Path, metavar="FILE", help=wanted)
    add("--force", action="store_true", help="write it of any run; it will say what was missing")
    return parser


def rebuild(argv: Sequence[str], say: Say, aside: Say | None = None) -> int:
    """Rebuild a run's report and print it; of several runs, theirs together. Returns the exit code.

    `aside` takes what is told beside --drain's commands. Raises UsageError for a directory that
    holds no run of ours, or one that is still going, for a golden file that cannot be read, or a
    run that none can be made of; StorageError.
    """
    names = _parser().read(argv)
    _refuse_options(names)
    tell = aside if names.drain and aside is not None else say
    if is_fleet(names.run_dirs):
        return _fleet(names, say, tell)
    run = _rebuild_one(names, tell)
    if names.prometheus is not None or names.drain:
        told = (names.run_dirs[0], run.verdict, run.exit_code)
        problem = _tell_others(fleet_of_one(*told, _again_for_fleet), names, say, tell)
        return run.exit_code or problem
    return run.exit_code


def _rebuild_one(names: Namespace, say: Say) -> "Rebuilt":
    golden = None if names.golden is None else read_golden(names.golden)
    run = _again(names.run_dirs[0], golden, names.golden)
    new = _golden_of(run, names) if names.write_golden is not None else None
    _write_and_say(run, say)
    if new is not None:
        write_golden(names.write_golden, new)
        say(f"[launcher] {what_was_written(names.write_golden, new)}")
    return run


def _write_and_say(run: "Rebuilt", say: Say) -> None:
    try:
        run.write()
    # The directory is another user's, or an archive: the verdict stands.
    except StorageError as error:
        say(f"[launcher] no report: {error}")
    for line in run.lines:
        say(f"[launcher] {line}")


def _fleet(names: Namespace, say: Say, tell: Say) -> int:
    """Each run's own report stands, unless it is held against a golden file."""
    if names.write_golden is not None:
        raise UsageError("report: --write-golden takes one run directory")
    if names.golden is not None:
        _hold_each_against(read_golden(names.golden), names, tell)
    result, output = fleet_of(names.run_dirs, names.output, _again_for_fleet)
    written: Path | None = output
    problem = EXIT_PASS
    try:
        write_fleet(result, output)
    except StorageError as error:
        tell(f"[launcher] no report: {error} (--output DIR: elsewhere)")
        # The directory of the runs is another user's, or an archive: the verdict stands.
        written, problem = None, error.exit_code if names.output else EXIT_PASS
    for line in fleet_lines(result, written):
        tell(f"[launcher] {line}")
    problem = _tell_others(result, names, say, tell) or problem
    return result.exit_code or problem


def _hold_each_against(golden: Golden, names: Namespace, tell: Say) -> None:
    for found in Search(names.run_dirs).found:
        # One that cannot be read is told by the merge.
        with suppress(UsageError):
            if found.problem is None:
                _write_and_say(_again(found.path, golden, names.golden), tell)


def _tell_others(result: FleetResult, names: Namespace, say: Say, tell: Say) -> int:
    """The exit code of what went wrong with that: a verdict that is worse than PASS stands."""
    if names.drain:
        say(drain_script(result))
    try:
        if names.prometheus is not None:
            write_prometheus(result, names.prometheus)
    except StorageError as error:
        tell(f"[launcher] error: {error}")
        return error.exit_code
    return EXIT_PASS


def _again_for_fleet(directory: Path) -> Again:
    """The report of a run that has none. It is written, too, unless the run may go on elsewhere.
    Raises UsageError."""
    has_end = read_record(directory).end is not None
    run = _rebuilt(directory, None, None)
    if has_end:
        with suppress(StorageError):
            _write([run])
    return Again(run.judgement.result, has_end)


class Rebuilt(NamedTuple):
    """A report that is made again, and not written yet."""

    verdict: Verdict
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
    result = last.judgement.result
    return Rebuilt(result.verdict, result.exit_code, lines, last, partial(_write, runs))


def _rounds_again(
    directory: Path, paths: Sequence[Path], golden: Golden | None, golden_file: Path | None
) -> Rebuilt:
    """Of those that began. Raises UsageError."""
    begun = [path for path in paths if os.path.exists(path / "run.json")]
    if not begun:
        raise UsageError(f"{directory}: none of its rounds has begun")
    runs, rounds = [_rebuilt(path, golden, golden_file) for path in begun], Rounds(directory)
    for run in runs:
        rounds.take(run.directory, run.judgement.result)
    result = rounds.result

    def write_all() -> None:
        _write(runs)
        write_rounds(result, directory)

    lines = list(rounds_lines(result, directory))
    return Rebuilt(result.verdict, result.exit_code, lines, runs[-1], write_all)


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
    return Rebuilt(left.result.verdict, left.result.exit_code, lines, None, write_all)


def _still_going(directory: Path, record: RunRecord | ComparisonRecord) -> UsageError:
    return StillGoing(f"{directory}: this run is still going (launcher pid {record.pid})")


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
    if names.output is not None and not is_fleet(names.run_dirs):
        raise UsageError(
            "report: --output is for several runs; one has its report in its directory"
        )
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
    watch = Watch(record.groups, max_lead=1, goes_on=goes_on, golden=golden, command=record.checked)
    told = (_told_by(name, directory) for name in record.groups)
    for _, name, event in heapq.merge(*told, key=itemgetter(0)):
        watch.on_event(name, event)
    watch.finish()
    return watch


def _rebuilt(directory: Path, golden: Golden | None, file: Path | None) -> Finished:
    record, held = read_record(directory), None
    if golden is not None:
        held = GoldenWatch(golden, str(file), record.groups, settings_of(directory, record.checked))
    watch = watched_again(record, directory, held)
    record = held_against_golden(as_it_ended(record, directory, watch), watch)
    judgement = conclude(record, watch, directory.absolute(), run_dir.kept)
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


def _cut_short(record: RunRecord, directory: Path, watch: Watch) -> RunRecord:
    """The launcher itself was killed: what its workers said is all there is. Raises UsageError when
    it lives."""
    if is_running(record):
        raise _still_going(directory, record)
    differs = watch.disagreements or any(h.broken for h in watch.all_facts.values())
    end = RunEnd(
        exit_code=EXIT_UNNAMED if differs else EXIT_INTERNAL,  # the verdict says who
        reason="the launcher did not live to see the end",
        disagreement=next(iter(watch.disagreements), None),
        further=tuple(watch.disagreements[1:]),
    )
    ended = tuple(_by_its_word(name, watch) for name in record.groups)
    return replace(record, end=end, ended=ended)


def _by_its_word(name: str, watch: Watch) -> WorkerEnd:
    done, curves = watch.all_facts[name].done, watch.curves[name]
    code = done.exit_code if done else None
    stopped = code is not None and request_of(code) is not None
    told_s = (curves.last_ns - curves.first_ns) / 1e9
    return WorkerEnd(name=name, pid=0, returncode=code, stopped_by_us=stopped, duration_s=told_s)


def _read_healths(record: RunRecord, directory: Path) -> dict[str, Health | None]:
    """From the telemetry files, which may be gone or cut since then: they speak for a run whose
    launcher was killed, or is older than the `healths` of run.json."""
    if record.telemetry_interval_s == 0:
        return {}
    return {name: _heard(telemetry_path(directory, name)) for name in record.gpus}


def _heard(path: Path) -> Health | None:
    record = Record()
    for event in lines_of(path, decode_gpu):
        record.record(event)
    return record.health()
