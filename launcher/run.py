"""One run from its first line to its exit code: directory, data, workers, verdict, reports."""

import json
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.contain.trampoline import raise_file_limit
from launcher.install.versions import versions
from launcher.launch import Session
from launcher.masking import masked
from launcher.output.printer import Printer
from launcher.plan import plan_prepare
from launcher.report import evidence, files
from launcher.report.checkpoints import resume_line
from launcher.report.closing import closing_lines
from launcher.supervise.policy import PATIENCE
from launcher.supervise.supervisor import Outcome, Supervisor
from launcher.telemetry.health_result import with_health
from launcher.verdict.judge import judge
from launcher.verdict.live import Watch
from launcher.verdict.results import Case, RunEnd, RunResult
from launcher.verdict.steps import History
from launcher.verdict.stop import Stop
from model_check.config.derived import failing_severities
from model_check.config.load import to_json
from model_check.errors import InternalError, ModelCheckError, StorageError
from model_check.utils.requests import TO_FORWARD, TO_STOP

if TYPE_CHECKING:
    from launcher.telemetry.monitor import Monitor


def run(session: Session, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code of the run; whatever stops it, its reports are written.

    Signals to stop, and those to forward, are the supervisor's to answer: between two of its runs,
    and while the reports are written, they wait.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*TO_STOP, *TO_FORWARD))
    raise_file_limit()  # five descriptors a worker
    directory = run_dir.create(session.around.run_dir)
    run_dir.link_latest(directory)
    printer = Printer(printer_out, launcher_log=directory / run_dir.LAUNCHER_LOG)
    try:
        return _run(session, argv, printer)
    finally:
        printer.close()


def _run(session: Session, argv: Sequence[str], printer: Printer) -> int:
    started = time.monotonic()
    facts = _facts(session, argv)
    _greet(session, printer)
    directory = session.around.run_dir
    run_dir.write(directory / "config.json", to_json(session.loaded.settings))
    run_dir.write(directory / "run.json", facts)
    watch, monitor = Watch(session.groups), _monitor(session, printer)
    outcome = _execute(session, printer, watch, facts, monitor)
    facts["duration_s"] = round(time.monotonic() - started, 3)
    result = _judge(facts, outcome, watch)
    healths = {} if monitor is None else monitor.healths
    facts["healths"] = msgspec.to_builtins(healths, str_keys=True)
    result = with_health(result, healths, facts["fail_on"])
    _close(session, printer, facts, result)
    return result.exit_code


def _monitor(session: Session, printer: Printer) -> "Monitor | None":
    """Telemetry of this run's GPUs; None: it has none, or is to be left alone."""
    uuids = {place.name: place.gpu.uuid for place in session.picked.places if place.gpu}
    interval_s = session.loaded.settings.launch.telemetry_interval_s
    if not uuids or interval_s == 0:
        return None
    from launcher.telemetry.monitor import Monitor  # no start on a CPU waits for it

    return Monitor(uuids, session.around.run_dir, interval_s, printer.say)


def _execute(
    session: Session,
    printer: Printer,
    watch: Watch,
    facts: dict[str, Any],
    monitor: "Monitor | None",
) -> Outcome:
    try:
        if session.arguments.command:
            supervisor = Supervisor(
                session.specs, session.limits, printer, watch, companion=monitor
            )
            return supervisor.run()
        return _prepare_and_train(session, printer, watch, facts, monitor)
    except ModelCheckError as error:
        printer.say(f"error: {error}")
        stop = Stop(str(error), error.exit_code, ())
        return Outcome(error.exit_code, stop, workers=(), leftovers=(), signals=0, dropped_lines=0)


def _prepare_and_train(
    session: Session,
    printer: Printer,
    watch: Watch,
    facts: dict[str, Any],
    monitor: "Monitor | None",
) -> Outcome:
    """One child builds or finds the token cache; then every worker opens it."""
    patient = replace(session.limits, silence_s=session.limits.silence_s * PATIENCE)
    prepare = plan_prepare(session.around)
    prepared = Supervisor([prepare], patient, printer, keep_signals=True).run()
    if prepared.exit_code != 0:
        return prepared
    data = _read_data(session.around.run_dir / "data.json")
    facts["data"] = data
    around = replace(session.around, token_cache=Path(data["path"]))
    ready = replace(session, around=around)
    return Supervisor(
        ready.specs,
        session.limits,
        printer,
        watch,
        companion=monitor,
        kept_signals=prepared.kept_signals,
        left_behind=prepared.leftovers,
    ).run()


def _read_data(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())  # msgspec: no path of any bytes
        data["path"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InternalError(f"{path}: the preparer left no usable answer: {error!r}") from error
    return data


def _facts(session: Session, argv: Sequence[str]) -> dict[str, Any]:
    gpus = {
        p.name: msgspec.to_builtins(p.gpu, str_keys=True) for p in session.picked.places if p.gpu
    }
    return run_dir.facts(
        argv,
        run_dir=str(session.around.run_dir),
        preset=session.loaded.preset,
        device=session.loaded.device,
        mode=session.loaded.settings.launch.mode,
        drill=session.loaded.settings.debug.drill,
        steps=None if session.arguments.command else session.loaded.settings.training.max_steps,
        workers=[place.name for place in session.picked.places],
        groups=dict(session.groups),
        not_compared=session.not_compared,
        fail_on=failing_severities(session.loaded.settings.launch),
        telemetry_interval_s=session.loaded.settings.launch.telemetry_interval_s,
        versions=_versions(session),
        gpus=gpus,
        notes=list(session.picked.notes),
    )


def _versions(session: Session) -> dict[str, str | None]:
    return {
        **versions(("torch", "numpy", "tokenizers")),
        "driver": session.picked.driver_version,
        "cuda_driver": session.picked.cuda_driver_version,
    }


def _greet(session: Session, printer: Printer) -> None:
    picked, loaded = session.picked, session.loaded
    num, on_gpu = len(picked.places), loaded.device == "cuda"
    unit = ("GPU" if on_gpu else "CPU worker") + ("" if num == 1 else "s")
    what = shlex.join(masked(session.arguments.command)) or f"preset {loaded.preset}"
    printer.say(f"Model Check: {num} {unit}, {what}")
    printer.say(picked.why if on_gpu else f"no GPU is used: {picked.why}")
    for note in picked.notes:
        printer.say(note)
    printer.say(f"run directory {session.around.run_dir}")
    if loaded.settings.debug.drill:
        printer.say(f"DRILL: {loaded.settings.debug.drill} will be injected")


def _judge(facts: dict[str, Any], outcome: Outcome, watch: Watch) -> RunResult:
    watch.finish()
    evidence.keep(watch.histories, Path(facts["run_dir"]))
    end = RunEnd(
        exit_code=outcome.exit_code,
        reason=outcome.stop.reason if outcome.stop else None,
        culprits=list(outcome.stop.culprits) if outcome.stop else [],
        tied=list(outcome.stop.tied) if outcome.stop else [],
        requests=list(outcome.requests),
        is_hang=outcome.stop is not None and outcome.stop.is_hang,
        disagreement=watch.disagreement,
        leftovers=list(outcome.leftovers),
        dropped_lines=outcome.dropped_lines,
    )
    histories = {w.name: watch.histories.get(w.name, History()) for w in outcome.workers}
    result = judge(Case(dict(facts), end, outcome.workers, histories, watch.agreed_steps))
    facts["end"] = msgspec.to_builtins(end)  # what `report` needs to judge again
    facts["ended"] = msgspec.to_builtins(outcome.workers)
    return result


def _close(session: Session, printer: Printer, facts: dict[str, Any], result: RunResult) -> None:
    directory = session.around.run_dir
    try:
        run_dir.write(directory / "run.json", facts)
        files.write(result, directory)
    except StorageError as error:  # a disk that filled up meanwhile: the verdict stands without it
        printer.say(f"no report: {error}")
    if msgspec.convert(facts["end"], RunEnd).is_by_signal:
        _tell_what_is_left(session, printer)
    tail = session.loaded.settings.logging.tail_lines
    for line in closing_lines(result, directory, tail):
        printer.say(line)


def _tell_what_is_left(session: Session, printer: Printer) -> None:
    """Of a training that somebody stopped."""
    names = [place.name for place in session.picked.places]
    line = resume_line(session.loaded.settings, names)
    if line is not None and not session.arguments.command:
        printer.say(line)
