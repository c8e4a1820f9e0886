"""`replay RUN_DIR`: steps of a run that is over, once more, on its devices."""

import argparse
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.arguments import RunArguments
from launcher.contain.trampoline import raise_file_limit
from launcher.devices import Machine, Picked
from launcher.gpus.probe import GpuProbe
from launcher.gpus.reservation import reserve
from launcher.history.gpu_history import GpuHistory, Memory
from launcher.launch import Launch
from launcher.output.printer import Printer
from launcher.plan import LaunchContext, Place, cpu_places
from launcher.replay import replay
from launcher.report.closing import closing_lines
from launcher.report.conclude import conclude, write
from launcher.report.read_run import is_running, read_record
from launcher.report.rebuild import as_it_ended, watched_again
from launcher.verdict.disagreement import Replay
from launcher.verdict.live import Watch
from launcher.verdict.record import RunRecord
from launcher.verdict.replay import Question, question_about, questions_of
from launcher.verdict.severity import Repeat
from model_check.config.arguments import Parser
from model_check.config.load import Request, load
from model_check.config.ranks import JOBS
from model_check.config.schema import LaunchSettings
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
    EXIT_USAGE,
    NoGpuError,
    UsageError,
)
from model_check.events import NonFinite, again
from model_check.utils.cores import usable_cores
from model_check.utils.project_files import COMMAND
from model_check.utils.requests import TO_FORWARD, TO_STOP
from model_check.utils.secrets import MASK
from model_check.utils.words import listed

_HANG = "launch.hang_timeout_s"
_ABOUT = """\
Compute steps of a run that is over once more, on the same GPU and on all healthy
ones beside it, and tell whether they give the bits of the run. Without a worker:
the one that the run names, to the step of its fault. The report is made again.
"""
_HELP = """
examples:
  bash run.sh replay .logs/latest
  bash run.sh replay .logs/latest --gpu 3       that GPU, named or not
  bash run.sh replay RUN_DIR CPU1 launch.replay_s=600
"""


def replay_again(argv: Sequence[str], probe: GpuProbe, environ: Mapping[str, str], out: int) -> int:
    """Do it. Returns the exit code of the run as its report is now; for a worker that the run does
    not name, 0 where it gave its bits again. Where nothing could be computed again, 75, where
    signal N ended it, 128+N, and the report stays what it was. Raises ModelCheckError."""
    names = _parser().read(argv)
    directory = names.run_dir.absolute()
    record = read_record(directory)
    if is_running(record):
        raise UsageError(f"{directory}: this run is still going (launcher pid {record.pid})")
    if record.mode in JOBS:
        raise UsageError(
            f"{directory}: a job of ranks is not replayed: each one's bits depend on the others "
            "(--mode replicate trains the same on each GPU alone)"
        )
    watch = watched_again(record, directory)
    record = as_it_ended(record, directory, watch)
    machine = Machine(probe, environ)
    question = _with_who_is_here(_question(_worker(names), record, watch), record, machine)
    overrides = tuple(word for word in names.words if "=" in word)
    launch = _launch(directory, overrides, question, record, machine, environ)
    if record.checked is not None:
        _go_where_it_ran(record)
    signal.pthread_sigmask(signal.SIG_BLOCK, (*TO_STOP, *TO_FORWARD))
    raise_file_limit()
    printer = Printer(out, launcher_log=directory / run_dir.LAUNCHER_LOG)
    try:
        replayed = replay([question], launch, record, watch, printer)
        if replayed.signum is not None:  # the report stays what it was
            return EXIT_SIGNAL_BASE + replayed.signum
        (found,) = replayed.replays
        is_named = any(question.suspects == each.suspects for each in questions_of(watch))
        if not is_named or not found.times:
            return _exit_code(found)
        return _conclude(found, record, watch, directory, launch.history, printer)
    finally:
        printer.close()


def _parser() -> Parser:
    usage = f"{COMMAND} replay RUN_DIR [WORKER | --gpu N] [launch.replay_s=S]"
    parser = Parser(usage=usage, description=_ABOUT, epilog=_HELP)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=".logs/latest is the newest")
    parser.add_argument(
        "words", nargs="*", default=(), metavar="WORKER", help="GPU3, CPU0, as its log says"
    )
    parser.add_argument("--gpu", metavar="N", help="the same as GPUN")
    return parser


def _worker(names: argparse.Namespace) -> str | None:
    """The worker that was asked for. Raises UsageError for several."""
    words = [word.upper() for word in names.words if "=" not in word]
    words += [f"GPU{names.gpu}"] if names.gpu is not None else []
    if len(words) > 1:
        raise UsageError(f"replay: {listed(words)}: name one worker")
    return next(iter(words), None)


def _question(worker: str | None, record: RunRecord, watch: Watch) -> Question:
    """Raises UsageError where a replay would prove nothing."""
    if record.steps is None and record.checked is None:
        raise UsageError(
            "replay: a command of your own ran there, and nothing of it was compared: run.sh check "
            "-- COMMAND compares it"
        )
    if MASK in "".join(record.own_command):
        raise UsageError(
            f"replay: its command line had a secret ({MASK}), which no file keeps: run the same "
            "check again"
        )
    if record.not_compared is not None:
        raise UsageError(f"replay: the bits of this run prove nothing: {record.not_compared}")
    if worker is not None and worker not in record.workers:
        raise UsageError(f"replay: this run has no {worker} (it has {', '.join(record.workers)})")
    own = [q for q in questions_of(watch) if worker is None or worker in q.suspects]
    asked_for = record.workers if worker is None else [worker]
    bad = {n: found for n in asked_for if (found := watch.all_facts[n].nonfinite) is not None}
    if bad and not own:
        raise UsageError(_no_bits(bad))
    if worker is None and not own:
        raise UsageError(
            f"replay: this run names no worker: say which (it has {', '.join(record.workers)})"
        )
    question = own[0] if own else question_about(str(worker), watch)
    if question is None:
        raise UsageError(f"replay: {worker} told no step in this run")
    return question


def _no_bits(bad: Mapping[str, NonFinite]) -> str:
    """A step that is not finite tells no bits: a replay would end before it and prove nothing."""
    each = (
        f"{name} met a NaN or Inf in step {found.step}, and computed it again itself"
        f"{again(found.repeated)}"
        for name, found in bad.items()
    )
    return f"replay: {'; '.join(each)}. Run again, with three workers of one kind or more"


def _with_who_is_here(question: Question, record: RunRecord, machine: Machine) -> Question:
    """Without healthy ones whose GPUs have gone since."""
    if record.device == "cpu":
        return question
    here = {gpu.uuid for gpu in machine.visible}
    healthy = (name for name in question.healthy if str(record.gpus[name]["uuid"]) in here)
    return replace(question, healthy=tuple(healthy))


def _launch(
    directory: Path,
    overrides: tuple[str, ...],
    question: Question,
    record: RunRecord,
    machine: Machine,
    environ: Mapping[str, str],
) -> Launch:
    """The workers of the question, with the settings of the run. Raises ConfigError, NoGpuError."""
    request = Request(config_file=directory / "config.json", overrides=overrides)
    loaded = load(request, lambda: record.device == "cuda")
    limits = loaded.settings.launch
    if limits.replay_s == 0:  # the run itself was to have none
        limits = replace(limits, replay_s=LaunchSettings().replay_s)
    if record.checked is not None and _HANG not in (record.asked_for or {}):
        limits = replace(limits, hang_timeout_s=0)  # as in its run
    loaded = replace(loaded, settings=replace(loaded.settings, launch=limits))
    num_cores = usable_cores()
    is_busy = os.getloadavg()[0] > num_cores / 2
    context = LaunchContext(environ, directory, num_cores, is_busy)
    command = tuple(record.own_command)
    arguments = RunArguments(request, command, directory, dry_run=False, as_json=False)
    picked = _picked(question, record, machine)
    return Launch(arguments, loaded, picked, context, check=record.checked)


def _go_where_it_ran(record: RunRecord) -> None:
    """A command of a person's own may name files by relative paths. Raises UsageError."""
    try:
        os.chdir(record.cwd)
    except OSError as error:
        why = f"{record.cwd}, where the command ran: {error.strerror}"
        raise UsageError(f"replay: {why}") from error


def _picked(question: Question, record: RunRecord, machine: Machine) -> Picked:
    """Raises NoGpuError for one that is not here any more, or taken."""
    if record.device == "cpu":
        return Picked(tuple(cpu_places(len(record.workers))), "as the run")
    here = {gpu.uuid: gpu for gpu in machine.visible}
    uuids = {name: str(record.gpus[name]["uuid"]) for name in question.workers}
    if missing := [f"{name} ({uuid})" for name, uuid in uuids.items() if uuid not in here]:
        raise NoGpuError(f"replay: not here any more: {', '.join(missing)}")
    gpus = [here[uuid] for uuid in uuids.values()]
    places = (Place(name, here[uuid].index, here[uuid]) for name, uuid in uuids.items())
    return Picked(tuple(places), "as the run", reservation=reserve(gpus))


def _exit_code(found: Replay) -> int:
    """Of a worker that the run does not name."""
    if found.is_software:
        return EXIT_USAGE
    if not found.times:
        return EXIT_UNPROVEN
    if found.doubted or not found.repeats:
        return EXIT_UNNAMED
    differs = found.disagreement or set(found.repeats.values()) != {Repeat.TRANSIENT}
    return EXIT_DISAGREEMENT if differs else EXIT_PASS


def _conclude(
    found: Replay,
    record: RunRecord,
    watch: Watch,
    directory: Path,
    history: GpuHistory | None,
    printer: Printer,
) -> int:
    """Make the run's report again, with what came of it in place of an earlier answer, and tell the
    history."""
    assert record.end is not None, "it is as it ended"
    others = [r for r in record.end.replays if r.suspects != found.suspects]
    record = replace(record, end=replace(record.end, replays=(*others, found)))
    memory = None if history is None else Memory(history, record)
    recall = None if memory is None else memory.recall
    judgement = conclude(record, watch, directory, run_dir.kept, recall)
    if memory is not None:
        memory.remember(judgement.result)
        record = replace(record, earlier_faults=memory.faults or None)
        if memory.problem is not None:
            printer.say(f"history: {memory.problem}")
    run_dir.write(directory / "run.json", msgspec.to_builtins(record, str_keys=True))
    write(judgement.result, record, watch, directory)
    for line in closing_lines(judgement, directory, tail_lines=0):
        printer.say(line)
    return judgement.result.exit_code
