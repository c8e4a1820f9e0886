"""The same run again and again (launch.repeat, launch.soak_s): each round is complete, in a
directory of its own, and one report tells of all."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from launcher import run_dir
from launcher.launch import Launch
from launcher.output.printer import Printer
from launcher.report.rounds import Rounds, rounds_lines, write_rounds
from launcher.run import begin, greet, printing, run_round
from launcher.verdict.record import RunEnd
from launcher.verdict.results import RunResult
from launcher.verdict.rounds import RoundsResult
from model_check.config.schema import LaunchSettings
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_HANG,
    EXIT_HEALTH,
    EXIT_NON_FINITE,
    EXIT_PASS,
    EXIT_UNNAMED,
    StorageError,
)

_OF_A_WORKER = (EXIT_NON_FINITE, EXIT_DISAGREEMENT, EXIT_HEALTH, EXIT_UNNAMED, EXIT_HANG)
"""How a round ends of which another one may tell more, who named nobody."""
_MAX_FAILED_IN_A_ROW = 3
"""The fault is there to stay: further rounds would only fill the disk."""


def run_rounds(launch: Launch, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code of the first round that did not pass, or what a difference
    between rounds asks for. Raises ModelCheckError."""
    launch = begin(launch)
    directory = launch.context.run_dir
    with printing(printer_out, launch.arguments, directory) as printer:
        greet(launch, printer)
    rounds = Rounds(directory)
    for path, result in _carried_out(launch, argv, printer_out):
        rounds.take(path, result)
    with printing(printer_out, launch.arguments, directory) as printer:
        _conclude(rounds.result, directory, printer)
    return rounds.result.exit_code


def _conclude(result: RoundsResult, directory: Path, printer: Printer) -> None:
    try:
        write_rounds(result, directory)
    # The disk has filled up: the verdict stands without its files.
    except StorageError as error:
        printer.say(f"no report: {error}")
    for line in rounds_lines(result, directory):
        printer.say(line)


def _carried_out(
    launch: Launch, argv: Sequence[str], printer_out: int
) -> Iterator[tuple[Path, RunResult]]:
    """One after the other, until it is enough; the first in any case."""
    took_s: list[float] = []
    num_failed = 0
    while _is_due(launch, took_s) and num_failed < _MAX_FAILED_IN_A_ROW:
        began = time.monotonic()
        path = run_dir.round_path(launch.context.run_dir, len(took_s) + 1)
        title = _title(launch.loaded.settings.launch, len(took_s) + 1)
        end, result = run_round(launch.in_directory(path), argv, printer_out, title)
        yield path, result
        if not _may_go_on(end, result):
            return
        num_failed = 0 if result.exit_code == EXIT_PASS else num_failed + 1
        took_s.append(time.monotonic() - began)


def _is_due(launch: Launch, took_s: Sequence[float]) -> bool:
    """Whether there is another round, by what the earlier ones took."""
    settings = launch.loaded.settings.launch
    if not took_s:
        return True
    if len(took_s) >= (settings.repeat or math.inf):
        return False
    ends_after_s = time.monotonic() - launch.began_at + median(took_s)
    return settings.soak_s == 0 or ends_after_s <= settings.soak_s


def _title(settings: LaunchSettings, number: int) -> str:
    return f"round {number} of {settings.repeat}" if settings.repeat else f"round {number}"


def _may_go_on(end: RunEnd, result: RunResult) -> bool:
    """Whether another round may tell more: not where this one was asked to end, was told wrong
    settings, or the machine lacks something."""
    # The preparer can be a culprit, too.
    names_worker = not {*result.culprits}.isdisjoint(result.run["workers"])
    is_of_worker = names_worker or result.exit_code in (EXIT_PASS, *_OF_A_WORKER)
    return is_of_worker and not (end.is_by_signal or end.is_deadline)
