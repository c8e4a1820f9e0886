"""One run from its first line to its exit code: directory, data, workers, verdict, reports."""

import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.arguments import RunArguments
from launcher.contain.trampoline import raise_file_limit
from launcher.install.versions import versions
from launcher.launch import Launch
from launcher.nodes.failures import JobEnded
from launcher.nodes.scheduler import started_by
from launcher.output.panel import Draw
from launcher.output.printer import Printer
from launcher.part import Part
from launcher.plan import WorkerSpec, plan_prepare
from launcher.supervise.outcome import Outcome
from launcher.supervise.supervisor import Supervisor
from launcher.verdict.live import Watch
from launcher.verdict.record import RunEnd, RunRecord
from launcher.verdict.results import Judgement, RunResult
from model_check.config.derived import failing_severities, in_short
from model_check.config.load import to_json
from model_check.config.ranks import SILENCE_PATIENCE
from model_check.config.resume import acting_settings
from model_check.errors import EXIT_PASS, InternalError, ModelCheckError, StorageError
from model_check.utils.project_files import version
from model_check.utils.requests import TO_FORWARD, TO_STOP
from model_check.utils.secrets import masked_argv
from model_check.utils.threads import start_without_signals

if TYPE_CHECKING:
    from launcher.report.live_table import LiveTable
    from launcher.telemetry.monitor import Monitor
    from launcher.verdict.golden_watch import GoldenWatch

_SHORT_UUID = len("GPU-77aa0b1c")
"""Characters: enough for --gpus."""


def begin(launch: Launch) -> Launch:
    """Make the run directory, which may get another name than was planned. Raises StorageError."""
    is_first = launch.nodes is None or launch.nodes.node == 0
    is_latest = is_first and launch.context.comparison is None
    directory = make_directory(launch.arguments, launch.context.run_dir, is_latest=is_latest)
    return launch.in_directory(directory)


def make_directory(arguments: RunArguments, planned: Path, *, is_latest: bool = True) -> Path:
    """The run directory, which may get another name than was planned. Raises StorageError.

    From here on signals to stop, and those to forward, are answered by the supervisor: between two
    of its runs, and while the reports are written, they wait.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*TO_STOP, *TO_FORWARD))
    # A worker takes five descriptors.
    raise_file_limit()
    create = run_dir.create if arguments.run_dir else run_dir.create_default
    directory = create(planned)
    if is_latest:
        run_dir.link_latest(directory)
    return directory


def run(launch: Launch, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code of the run; whatever stops it, its reports are written."""
    launch = begin(launch)
    with printing(printer_out, launch.arguments, launch.context.run_dir) as printer:
        greet(launch, printer)
        _, result = run_one(launch, argv, printer)
    return result.exit_code


def run_one(
    launch: Launch, argv: Sequence[str], printer: Printer, title: str = ""
) -> tuple[RunEnd, RunResult]:
    """Of a run that has begun. `title`: see Run."""
    done = Run(launch, printer, argv, title)
    result = done.carry_out()
    return done.end, result


def run_round(
    launch: Launch, argv: Sequence[str], printer_out: int, title: str
) -> tuple[RunEnd, RunResult]:
    """One of several rounds, in a directory that is made for it; said in two lines, where it
    passes."""
    directory = run_dir.create(launch.context.run_dir)
    with printing(printer_out, launch.arguments, directory) as printer:
        printer.say(f"{title}: {directory}")
        return run_one(launch, argv, printer, title)


@contextmanager
def printing(printer_out: int, arguments: RunArguments, directory: Path) -> Iterator[Printer]:
    log = directory / run_dir.LAUNCHER_LOG
    printer = Printer(printer_out, log, is_plain=arguments.plain)
    try:
        yield printer
    finally:
        printer.close()


class Run:
    """One run, and what becomes known of it."""

    def __init__(
        self, launch: Launch, printer: Printer, argv: Sequence[str], title: str = ""
    ) -> None:
        """`title`: of one of several rounds."""
        self._launch = launch
        self._printer = printer
        self._title = title
        self._record = _record(launch, argv)
        self._directory = launch.context.run_dir
        settings = launch.loaded.settings.launch
        self._watch = Watch(
            launch.groups,
            settings.max_lead,
            settings.dossier_gib * 2**30,
            goes_on=settings.on_suspect == "continue",
            golden=_golden_watch(launch),
            command=self._record.checked,
        )
        self._part = Part(launch, printer)
        self.all_go_on = False
        """Whether all nodes of a job that failed would try again."""
        self._monitor = _monitor(launch, printer)
        # Now: a path may be relative to a working directory that is gone at the end.
        self._history = launch.history

    @property
    def end(self) -> RunEnd:
        assert self._record.end is not None, "it was carried out"
        return self._record.end

    @property
    def newest_checkpoint(self) -> Path | None:
        """The last that its workers have saved, as far as this machine has heard of it."""
        from launcher.report.files import intact

        saved = [event for each in self._watch.all_facts.values() for event in each.saved]
        return next((Path(event.path) for event in reversed(intact(saved))), None)

    def carry_out(self, goes_on: Callable[[RunEnd, int], bool] = lambda *_: False) -> RunResult:
        """`goes_on`: whether the job would be tried again, by its end and its exit code."""
        try:
            result = self._carry_out()
        except BaseException as error:
            self._part.break_off(error)
            raise
        why, code = str(self.end.reason), result.exit_code
        self.all_go_on = self._part.leave(why, code, goes_on=goes_on(self.end, code))
        return result

    def _carry_out(self) -> RunResult:
        started = time.monotonic()
        run_dir.write(self._directory / "config.json", to_json(self._launch.loaded.settings))
        self._write_record()
        outcome = self._execute()
        from launcher.report.conclude import held_against_golden

        self._watch.finish()
        found = self._watch.disagreements
        self._record = self._part.agreement(self._record)
        end = replace(
            outcome.end,
            disagreement=next(iter(found), None),
            further=tuple(found[1:]),
            mismatch=self._watch.mismatch,
        )
        self._record = replace(
            self._record,
            duration_s=round(time.monotonic() - started, 3),
            end=end,
            ended=outcome.workers,
            healths=self._monitor.healths if self._monitor else {},
        )
        self._record = held_against_golden(self._record, self._watch)
        self._replay(outcome)
        judgement = self._concluded()
        has_report = self._write_reports(judgement.result)
        self._close(judgement, has_report=has_report)
        return judgement.result

    def _close(self, judgement: Judgement, *, has_report: bool) -> None:
        from launcher.report.closing import closing_lines

        result = judgement.result
        tail = self._launch.loaded.settings.logging.tail_lines
        lines = closing_lines(
            judgement,
            self._directory,
            tail,
            has_report=has_report,
            more=self._next_lines(result.exit_code),
        )
        if self._title and result.exit_code == EXIT_PASS:
            lines = iter([f"{self._title}: {result.verdict}: {result.summary}"])
        for line in lines:
            self._printer.say(line)

    def _execute(self) -> Outcome:
        try:
            if self._launch.arguments.command:
                return self._supervise(self._launch.specs)
            self._join()
            outcome = self._prepare_and_train()
        except JobEnded as ended:
            outcome = Outcome(ended.end)
        except ModelCheckError as error:
            outcome = Outcome(RunEnd(reason=str(error), exit_code=error.exit_code))
        return self._part.concluded(outcome)

    def _join(self) -> None:
        """The other nodes of its job. Raises ModelCheckError."""
        self._launch, self._record = self._part.join(self._launch, self._record)
        if self._part.nodes is not None:
            self._write_record()

    def _prepare_and_train(self) -> Outcome:
        """One child builds or finds the token cache; then every worker opens it."""
        launch = self._launch
        start_without_signals(Thread(target=_import_what_judges, daemon=True))
        patient = replace(launch.limits, silence_s=launch.limits.silence_s * SILENCE_PATIENCE)
        preparer = Supervisor(
            [plan_prepare(launch.context)],
            patient,
            self._printer,
            keep_signals=True,
            other_nodes=self._part.nodes,
        )
        prepared = preparer.run()
        if prepared.end.exit_code != 0 or prepared.end.is_deadline:
            return prepared
        data = _read_data(self._directory / "data.json")
        self._record = replace(self._record, data=data)
        context = replace(launch.context, token_cache=Path(data["path"]))
        self._printer.say("starting the training: importing torch, building the model ...")
        return self._train(replace(launch, context=context), prepared)

    def _train(self, launch: Launch, after: Outcome) -> Outcome:
        if not launch.is_job:
            return self._supervise(launch.specs, after)
        data = self._record.data
        told = "" if data is None else f"{Path(data['path']).name}, {data['num_tokens']} tokens"
        with self._part.open_meeting(told) as meeting:
            context = replace(launch.context, meeting=meeting)
            return self._supervise(replace(launch, context=context).specs, after)

    def _supervise(self, specs: Sequence[WorkerSpec], after: Outcome | None = None) -> Outcome:
        supervisor = Supervisor(
            specs,
            self._launch.limits,
            self._printer,
            self._watch,
            companion=self._monitor,
            other_nodes=self._part.nodes,
            after=after,
        )
        if self._launch.arguments.command:  # its lines are all that is known of it
            return supervisor.run()
        with self._printer.showing(table_of(self._directory)):
            return supervisor.run()

    def _replay(self, outcome: Outcome) -> None:
        """Where workers differ, or one changed by itself: the steps to there again."""
        from launcher.replay import questions_to, replay

        questions = questions_to(self._launch, self._record, self._watch)
        if not questions or self._record.end is None:
            return
        with suppress(StorageError):  # `_write_reports` tells it
            self._write_record()  # a launcher that is killed meanwhile leaves what is known
        run = (self._launch, self._record, self._watch)
        try:
            replays = replay(questions, *run, self._printer, outcome).replays
        except ModelCheckError as error:
            self._printer.say(f"not replayed: {error}")
            return
        self._record = replace(self._record, end=replace(self._record.end, replays=replays))

    def _concluded(self) -> Judgement:
        """Judged by what the history holds of these GPUs, too; the history keeps the run."""
        from launcher.report.conclude import conclude

        if self._history is None:
            return conclude(self._record, self._watch, self._directory)
        from launcher.history.gpu_history import Memory

        memory = Memory(self._history, self._record)
        judgement = conclude(self._record, self._watch, self._directory, recall=memory.recall)
        memory.remember(judgement.result)
        self._record = replace(self._record, earlier_faults=memory.faults or None)
        if memory.problem is not None:
            self._printer.say(f"history: {memory.problem}")
        return judgement

    def _write_record(self) -> None:
        record = msgspec.to_builtins(self._record, str_keys=True)
        run_dir.write(self._directory / "run.json", record)

    def _write_reports(self, result: RunResult) -> bool:
        """Whether they are there."""
        from launcher.report.conclude import write

        try:
            self._write_record()
            write(result, self._record, self._watch, self._directory)
        # The disk has filled up during the run: the verdict stands without its files.
        except StorageError as error:
            self._printer.say(f"no report: {error}")
            return False
        return True

    def _next_lines(self, exit_code: int) -> Iterator[str]:
        """What to do with what is done, or with what a signal stopped."""
        from launcher.report.closing import checkpoint_lines, line_on_check

        launch, is_stopped = self._launch, self.end.is_by_signal
        is_over = is_stopped or exit_code == EXIT_PASS
        if not is_over:
            return iter(())
        if command := launch.arguments.command:
            is_plain = exit_code == EXIT_PASS and launch.check is None
            return iter([line_on_check(command, launch.loaded.device)] if is_plain else [])
        saved = {name: each.saved for name, each in self._watch.all_facts.items()}
        if launch.is_job:  # one rank writes for all
            saved = {"the job": [event for each in saved.values() for event in each]}
        speaks = (self._record.data or {}).get("speaks", "text")
        loaded = launch.loaded
        return checkpoint_lines(
            loaded.settings, loaded.preset, saved, is_stopped=is_stopped, speaks=speaks
        )


def _import_what_judges() -> None:
    """No start waits for it. A training may last for days, and find another version of the program
    at its end."""
    import launcher.history.gpu_history
    import launcher.replay
    import launcher.report.closing
    import launcher.report.conclude  # noqa: F401


def table_of(directory: Path) -> Draw:
    """The live table of a run. Made when it is drawn first: no start waits for rich."""

    @cache
    def table() -> "LiveTable":
        from launcher.report.live_table import LiveTable
        from launcher.report.progress import watched

        return LiveTable([watched(directory)])

    return lambda columns, rows: table().own_lines(columns, rows)


def greet(launch: Launch, printer: Printer) -> None:
    picked, loaded, say = launch.picked, launch.loaded, printer.say
    num, on_gpu = len(picked.places), loaded.device == "cuda"
    unit = ("GPU" if on_gpu else "CPU worker") + ("" if num == 1 else "s")
    command = masked_argv(launch.arguments.command)
    say(f"Model Check: {num} {unit}, {shlex.join(command) or f'preset {loaded.preset}'}")
    if not command:
        say(f"training: {in_short(loaded.settings, launch.context.num_ranks or 1)}")
    if not on_gpu:
        say(f"no GPU is used: {picked.why}")
    for place in picked.places:
        if place.gpu is not None:  # a line for each: grep finds what is said of one
            say(f"{place.name}: {place.gpu.name} ({place.gpu.uuid[:_SHORT_UUID]})")
    for note in picked.notes:
        say(note)
    say(f"run directory {launch.context.run_dir}")
    if printer.has_reader:
        say("in another terminal, from here: bash run.sh watch")
    if loaded.settings.debug.drill:
        say(f"DRILL: {loaded.settings.debug.drill} will be injected")


def _golden_watch(launch: Launch) -> "GoldenWatch | None":
    """None: the settings name no golden file."""
    if launch.golden is None:
        return None
    from launcher.verdict.golden_watch import GoldenWatch

    settings, checked = launch.loaded.settings, launch.check
    acting = checked.told if checked else acting_settings(msgspec.to_builtins(settings))
    return GoldenWatch(launch.golden, str(settings.launch.golden), launch.groups, acting)


def _monitor(launch: Launch, printer: Printer) -> "Monitor | None":
    """Telemetry of this run's GPUs; None: it has none, or the settings ask for no telemetry."""
    uuids = {place.name: place.gpu.uuid for place in launch.picked.places if place.gpu}
    interval_s = launch.loaded.settings.launch.telemetry_interval_s
    if not uuids or interval_s == 0:
        return None
    # The start of a run on the CPU does not wait for this import.
    from launcher.telemetry.monitor import Monitor

    return Monitor(uuids, launch.context.run_dir, interval_s, printer.say)


def _read_data(path: Path) -> dict[str, Any]:
    """Raises InternalError."""
    try:
        # Not by msgspec, which refuses a path that is not UTF-8.
        data: dict[str, Any] = json.loads(path.read_bytes())
        data["path"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InternalError(f"{path}: the preparer left no usable answer: {error!r}") from error
    return data


def _record(launch: Launch, argv: Sequence[str]) -> RunRecord:
    """What is known before the start."""
    picked, settings = launch.picked, launch.loaded.settings
    return RunRecord(
        command=masked_argv(argv),
        started_at=datetime.now().astimezone(),
        started_ns=time.monotonic_ns(),
        pid=os.getpid(),
        cwd=str(Path.cwd()),
        host=platform.node(),
        scheduler=(by := started_by(launch.context.environ)).scheduler,
        node=by.node,
        kernel=platform.release(),
        python=sys.version.split()[0],
        run_dir=str(launch.context.run_dir),
        preset=launch.loaded.preset,
        device=launch.loaded.device,
        mode=settings.launch.mode,
        drill=settings.debug.drill,
        asked_for=dict(msgspec.to_builtins(launch.loaded.asked_for)),
        steps=None if launch.arguments.command else settings.training.max_steps,
        checked=launch.check,
        workers=[place.name for place in picked.places],
        groups=launch.groups,
        not_compared=launch.not_compared,
        fail_on=list(failing_severities(settings.launch)),
        on_suspect=settings.launch.on_suspect,
        telemetry_interval_s=settings.launch.telemetry_interval_s,
        versions={
            **versions(("torch", "numpy", "tokenizers", "flash_attn")),
            "model_check": version(),
            "driver": picked.snapshot.driver_version,
            "cuda_driver": picked.snapshot.cuda_driver_version,
        },
        gpus={
            place.name: msgspec.to_builtins(place.gpu, str_keys=True)
            for place in picked.places
            if place.gpu
        },
        notes=list(picked.notes),
    )
