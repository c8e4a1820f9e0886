"""A comparison from its first line to its exit code: each training is a launcher of its own, with a
run directory of its own, so that one that fails leaves the others alone."""

import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from launcher.compare.arms import SEAT, split_arms
from launcher.compare.comparison import Comparison, Trial, seat_of, tag_of
from launcher.output.printer import LAUNCHER_PREFIX, Printer
from launcher.plan import WorkerSpec
from launcher.report.comparison import comparison_lines, what_is_left, write_record
from launcher.run import make_directory, printing
from launcher.supervise.outcome import Outcome
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor
from launcher.supervise.teardown import REAP_S
from launcher.verdict.comparison import ComparisonRecord, TrialRecord
from launcher.verdict.record import RunEnd, WorkerEnd
from model_check.config.fields import setting_text
from model_check.errors import EXIT_SIGNAL_BASE, StorageError, describe_exit, exit_code_of
from model_check.utils.project_files import PACKAGES
from model_check.utils.requests import TO_FORWARD, request_of
from model_check.utils.secrets import masked_argv
from model_check.utils.words import listed

_MORE_GRACE_S = REAP_S + 10.0
"""A launcher that is asked to end gets so much longer than it gives its own workers: it waits for
one that cannot be killed, and writes its report."""
_CLOSING_S = 3.0
"""Before its deadline a comparison leaves its trainings this much less, to write its report."""


def run_comparison(comparison: Comparison, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code: of the first training that failed. Raises StorageError where
    no run directory can be made."""
    directory = make_directory(comparison.arguments, comparison.run_dir)
    comparison = replace(comparison, run_dir=directory)
    with printing(printer_out, directory) as printer:
        _greet(comparison, printer)
        return _Run(comparison, argv, printer).carry_out()


class _Run:
    def __init__(self, comparison: Comparison, argv: Sequence[str], printer: Printer) -> None:
        self._comparison, self._printer = comparison, printer
        self._argv = argv
        self._record = _record(comparison, argv)

    def carry_out(self) -> int:
        self._write_record()
        after: Outcome | None = None
        for number, turn in enumerate(self._comparison.turns, 1):
            if self._is_too_late():
                self._record = replace(self._record, is_deadline=True)
                break
            self._tell_turn(number, turn)
            after = self._supervise(turn, number, after)
            self._remember(turn, after)
            is_last = number == len(self._comparison.turns)
            if (signum := _request(after.end, is_last)) is not None:
                self._record = replace(self._record, signal=signum)
                break
        return self._conclude()

    def _supervise(self, turn: Sequence[Trial], number: int, after: Outcome | None) -> Outcome:
        launch = self._comparison.common.settings.launch
        limits = Limits(launch.grace_s + _MORE_GRACE_S, 0.0, is_independent=True)
        left_s = self._left_s()
        if left_s is not None:  # each turn gets as much
            left_s /= len(self._comparison.turns) + 1 - number
        specs = [self._spec(trial, left_s) for trial in turn]
        return Supervisor(specs, limits, self._printer, after=after).run()

    def _spec(self, trial: Trial, left_s: float | None) -> WorkerSpec:
        comparison, arm = self._comparison, trial.arm
        seat = seat_of(trial, comparison, left_s)
        path = [str(PACKAGES), *filter(None, [comparison.environ.get("PYTHONPATH")])]
        return WorkerSpec(
            name=trial.title,
            argv=(
                *(sys.executable, "-P", "-m", "launcher"),
                *split_arms(self._argv)[0],
                *("--arm", arm.name, *arm.overrides),
            ),
            env={
                **comparison.environ,
                "PYTHONPATH": os.pathsep.join(path),
                SEAT: seat.to_text(),
            },
            log_path=comparison.run_dir / f"{trial.directory.as_posix().replace('/', '.')}.log",
            prefix="",
            is_launcher=True,
        )

    def _left_s(self) -> float | None:
        """Until a training must be over; None: there is no deadline."""
        deadline_s = self._comparison.common.settings.launch.deadline_s
        if not deadline_s:
            return None
        return deadline_s - (time.monotonic() - self._comparison.began_at) - _CLOSING_S

    def _is_too_late(self) -> bool:
        left_s = self._left_s()
        return left_s is not None and left_s <= 0

    def _tell_turn(self, number: int, turn: Sequence[Trial]) -> None:
        if len(self._comparison.turns) > 1:
            who = ", ".join(f"{trial.title} on {_names(trial)}" for trial in turn)
            self._printer.say(f"turn {number} of {len(self._comparison.turns)}: {who}")

    def _remember(self, turn: Sequence[Trial], outcome: Outcome) -> None:
        """How the launchers of a turn ended."""
        ends = {end.name: end for end in outcome.workers}
        of_turn = {
            str(trial.directory): (ends[trial.title], tag_of(trial, self._comparison))
            for trial in turn
        }
        trials = [
            _ended(each, *of_turn[each.directory]) if each.directory in of_turn else each
            for each in self._record.trials
        ]
        self._record = replace(self._record, trials=trials)
        with suppress(StorageError):  # it is told at the end
            self._write_record()

    def _write_record(self) -> None:
        """A launcher that is killed later leaves what is known."""
        write_record(self._record, self._comparison.run_dir)

    def _conclude(self) -> int:
        directory = self._comparison.run_dir
        left = what_is_left(self._record, directory)
        try:
            self._write_record()
            left.write(directory)
        # The disk has filled up: the verdict stands without its files.
        except StorageError as error:
            self._printer.say(f"no report: {error}")
        for line in comparison_lines(left.result, directory):
            self._printer.say(line)
        return left.result.exit_code


def _request(end: RunEnd, is_last: bool) -> int | None:
    """The signal after which no further turn begins: one that ended this one, or has its trainings
    save and end early, or came too late for it."""
    if end.is_by_signal:
        return end.exit_code - EXIT_SIGNAL_BASE
    return next((s for s in end.requests if s in TO_FORWARD or not is_last), None)


def _ended(trial: TrialRecord, end: WorkerEnd, tag: str) -> TrialRecord:
    last = next(reversed(end.last_lines), "").removeprefix(f"{LAUNCHER_PREFIX}{tag}")
    words = end.spawn_error or last or None
    if (code := end.returncode) is None:
        return replace(trial, last_words=words)
    # What it ended by otherwise is its own: it may have failed in that moment.
    is_stopped = end.stopped_by_us and (code < 0 or request_of(code) is not None)
    if is_killed := code < 0 and not is_stopped:
        words = f"its launcher was {describe_exit(code)}"
    return replace(
        trial,
        exit_code=exit_code_of(code),
        is_stopped=is_stopped,
        is_killed=is_killed,
        last_words=words,
    )


def _names(trial: Trial) -> str:
    return listed([place.name for place in trial.places])


def _greet(comparison: Comparison, printer: Printer) -> None:
    say, picked = printer.say, comparison.picked
    arms, seeds = list(comparison.loaded), comparison.seeds
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
        say(f"{arm}: {_own_settings(comparison, arm)}")
    if not comparison.differing:
        say("no setting differs between the arms: what differs is noise")
    say(comparison.order)


def _own_settings(comparison: Comparison, arm: str) -> str:
    values = {name: values[arm] for name, values in comparison.differing.items()}
    return ", ".join(f"{name}={setting_text(value)}" for name, value in values.items())


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
        trials=[
            TrialRecord(
                arm=trial.arm.name,
                seed=trial.seed,
                directory=str(trial.directory),
                workers=[place.name for place in trial.places],
            )
            for turn in comparison.turns
            for trial in turn
        ],
    )
