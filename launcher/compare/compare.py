"""A comparison from its first line to its exit code: each training is `run.sh --config D/arm.json
--run-dir D/arm`, so that one that fails leaves the others alone."""

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Thread

import msgspec
from msgspec.structs import replace

from launcher import run_dir
from launcher.compare.comparison import Comparison, asked_of, loaded_of, seeds_of
from launcher.gpus.reservation import LOCK_DIR
from launcher.output.append_file import AppendFile
from launcher.output.printer import LAUNCHER_PREFIX, Printer
from launcher.output.streams import READ_BYTES
from launcher.output.view import View
from launcher.report.comparison import comparison_lines, what_is_left, write_record
from launcher.run import make_directory, printing, table_of
from launcher.supervise.signals import answered
from launcher.supervise.worker import SpawnError
from launcher.verdict.comparison import ComparisonRecord, TrialRecord
from model_check.config.fields import nested, setting_text
from model_check.errors import StorageError, describe_exit, exit_code_of
from model_check.utils.project_files import PACKAGES
from model_check.utils.requests import REQUESTS, TO_STOP, request_of
from model_check.utils.secrets import masked_argv
from model_check.utils.threads import start_without_signals
from model_check.utils.words import listed

_CLOSING_S = 3.0
"""Before its deadline a comparison leaves its trainings this much less, to write its report."""
PROGRAM = "launcher.__main__"
_LAST_WORDS_S = 2.0
"""To hear what one has said that has ended: a process that it left behind may hold the pipe."""
_SPEAKER = re.compile(r"\[[^\[\]]+\] ")


def run_comparison(comparison: Comparison, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code: of the first training that failed. Raises StorageError where
    no run directory can be made."""
    directory = make_directory(comparison.arguments, comparison.run_dir)
    comparison = replace(comparison, run_dir=directory)
    with printing(printer_out, comparison.arguments, directory) as printer:
        _greet(comparison, printer)
        record = _record(comparison, argv)
        write_record(record, directory)
        with printer.showing(table_of(directory)):
            record = _trained(comparison, record, printer)
        return _conclude(record, directory, printer)


def _trained(
    comparison: Comparison, record: ComparisonRecord, printer: Printer
) -> ComparisonRecord:
    """Turn by turn; returns how the trainings ended."""
    launch, turns = comparison.common.settings.launch, comparison.turns
    until = comparison.began_at + launch.deadline_s - _CLOSING_S
    for number, turn in enumerate(turns):
        # Each turn gets as much of the time that is left.
        left_s = (until - time.monotonic()) / (len(turns) - number) if launch.deadline_s else None
        if left_s is not None and left_s <= 0:
            return replace(record, is_deadline=True)
        if len(turns) > 1:
            who = ", ".join(f"{' '.join(t.names)} on {listed(t.workers)}" for t in turn)
            printer.say(f"turn {number + 1} of {len(turns)}: {who}")
        children = {t.directory: _start(t, comparison, left_s, printer) for t in turn}
        signum = wait_for([*children.values()])
        trials = [
            _ended(each, children[each.directory]) if each.directory in children else each
            for each in record.trials
        ]
        record = replace(record, trials=trials, signal=signum)
        with suppress(StorageError):  # it is told at the end
            write_record(record, comparison.run_dir)
        if signum is not None:
            break
    return record


def _start(
    trial: TrialRecord, comparison: Comparison, left_s: float | None, printer: Printer
) -> "Child":
    """Raises SpawnError and StorageError."""
    loaded = loaded_of(trial, comparison)
    for note in (*loaded.notes, *loaded.decisions):
        printer.say(f"{' '.join(trial.names)}: {note}")
    stem = str(comparison.run_dir / trial.directory.replace("/", "."))
    ((_, layer),) = asked_of(trial, comparison, left_s).arm
    document = msgspec.json.format(msgspec.json.encode(nested(layer)), indent=2)
    run_dir.write(config := Path(f"{stem}.json"), document)
    where = str(comparison.run_dir / trial.directory)
    argv = ("--preset", loaded.preset, "--config", str(config), "--run-dir", where)
    environ = comparison.environ
    if comparison.picked.reservation is not None:  # it is ours: who trains there locks other files
        run_dir.opened(locks := comparison.run_dir / "locks").close()
        environ = {**environ, LOCK_DIR: str(locks)}
    return Child(argv, environ, Path(f"{stem}.log"), trial.tag, printer)


def _ended(trial: TrialRecord, child: "Child") -> TrialRecord:
    code = child.process.returncode
    # What it ended by otherwise is its own: it may have failed in that moment.
    is_stopped = child.is_asked_to_stop and (code < 0 or request_of(code) is not None)
    is_killed = code < 0 and not is_stopped
    words = child.last_line.removeprefix(LAUNCHER_PREFIX) or None
    return replace(
        trial,
        exit_code=exit_code_of(code),
        is_stopped=is_stopped,
        is_killed=is_killed,
        last_words=f"its launcher was {describe_exit(code)}" if is_killed else words,
    )


def _conclude(record: ComparisonRecord, directory: Path, printer: Printer) -> int:
    left = what_is_left(record, directory)
    try:
        write_record(record, directory)
        left.write(directory)
    # The disk has filled up: the verdict stands without its files.
    except StorageError as error:
        printer.say(f"no report: {error}")
    for line in comparison_lines(left.result, directory):
        printer.say(line)
    return left.result.exit_code


def _greet(comparison: Comparison, printer: Printer) -> None:
    say, picked = printer.say, comparison.picked
    arms, seeds = list(comparison.loaded), seeds_of(comparison.common.settings)
    each = f", seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else ""
    say(f"Model Check: {len(arms)} arms, {listed(arms)}{each}, preset {comparison.common.preset}")
    if comparison.common.device == "cpu":
        say(f"no GPU is used: {picked.why}")
    for place in picked.places:
        if place.gpu is not None:
            say(f"{place.name}: {place.gpu.name}")
    for note in picked.notes:
        say(note)
    say(f"run directory {comparison.run_dir}")
    for arm in arms if comparison.differing else ():
        values = (
            f"{name}={setting_text(each[arm])}" for name, each in comparison.differing.items()
        )
        say(f"{arm}: {', '.join(values)}")
    if not comparison.differing:
        say("no setting differs between the arms: what differs is noise")
    say(comparison.order)


def _record(comparison: Comparison, argv: Sequence[str]) -> ComparisonRecord:
    """What is known before the start."""
    common = comparison.common
    return ComparisonRecord(
        command=masked_argv(argv),
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        pid=os.getpid(),
        host=platform.node(),
        cwd=str(Path.cwd()),
        preset=common.preset,
        device=common.device,
        differing=msgspec.to_builtins(comparison.differing),
        trials=[trial for turn in comparison.turns for trial in turn],
    )


class Child:
    """The launcher of one training."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], log: Path, tag: str, printer: Printer
    ) -> None:
        """`tag`: what stands behind the name of who prints a line. Raises SpawnError."""
        self._tag, self._printer = tag, printer
        self._log = AppendFile(log, printer.say)
        self.is_asked_to_stop = False
        self.last_line = ""
        code = (
            f"import sys; sys.path.append({str(PACKAGES)!r}); "
            f"from launcher.contain.linux import die_with_parent; die_with_parent({os.getpid()}); "
            f"from {PROGRAM} import main; main()"
        )
        try:
            # It begins with requests blocked, as we have them: none kills it before it answers.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *argv],
                bufsize=0,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            raise SpawnError("no process for a training", error) from error
        self.reader = Thread(target=self._relay, daemon=True)
        start_without_signals(self.reader)

    def send(self, signum: int) -> None:
        self.is_asked_to_stop |= signum in TO_STOP
        self.process.send_signal(signum)

    def _relay(self) -> None:
        assert self.process.stdout is not None
        view = View()
        with self.process.stdout as output:
            while data := os.read(output.fileno(), READ_BYTES):
                self._log.write(data)
                self._show(view.feed(data, time.monotonic()))
        self._show(view.close())
        self._log.close()

    def _show(self, lines: list[str]) -> None:
        if lines:
            self.last_line = lines[-1]
            self._printer.lines("", [tagged(line, self._tag) for line in lines])


def tagged(line: str, tag: str) -> str:
    """`[CPU1] [infini] Step ...`"""
    speaker = _SPEAKER.match(line)
    at = speaker.end() if speaker else 0
    return f"{line[:at] or LAUNCHER_PREFIX}{tag}{line[at:]}"


def wait_for(children: Sequence[Child]) -> int | None:
    """Until all have ended, and pass on the signals that come meanwhile. Returns the first that
    asks to stop, else the first request, else None."""
    received: list[signal.Signals] = []
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, exit codes are lost
    signals = answered()
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        signals.append(signal.SIGTSTP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    while running := [child for child in children if child.process.poll() is None]:
        received.append(signal.Signals(signal.sigwait(signals)))
        if received[-1] != signal.SIGCHLD:
            _pass_on(received[-1], running)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for child in children:
        child.reader.join(_LAST_WORDS_S)
    asked = [signum for signum in received if signum in REQUESTS]
    return next((signum for signum in asked if signum in TO_STOP), next(iter(asked), None))


def _pass_on(signum: int, children: Sequence[Child]) -> None:
    """What is to stop them until they are continued stops us, too. Where no shell is above, the
    kernel has us go on at once."""
    for child in children:
        child.send(signum)
    if signum == signal.SIGTSTP:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTSTP,))
        signal.raise_signal(signal.SIGTSTP)  # here we stop
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
        _pass_on(signal.SIGCONT, children)
