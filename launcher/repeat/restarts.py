"""A job of ranks that failed goes on from its newest checkpoint (launch.max_restarts): each attempt
is a run in a directory of its own below the first one's. On several nodes all of them go on, or
none; the first one chooses the checkpoint, for it alone knows what its ranks have written."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from launcher import run_dir
from launcher.launch import Launch
from launcher.output.printer import Printer
from launcher.part import resumed_from
from launcher.run import Run, begin, greet, printing
from launcher.verdict.record import RunEnd
from launcher.verdict.results import RunResult
from model_check.errors import (
    EXIT_HEALTH,
    EXIT_INTERNAL,
    EXIT_NO_GPU,
    EXIT_PASS,
    EXIT_UNPROVEN,
    EXIT_USAGE,
)

_FINAL = (EXIT_PASS, EXIT_USAGE, EXIT_HEALTH, EXIT_NO_GPU, EXIT_INTERNAL, EXIT_UNPROVEN)
"""A restart would change nothing of what these tell."""


def run_with_restarts(launch: Launch, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code of the last attempt. Raises ModelCheckError."""
    launch = begin(launch)
    directory, most = launch.context.run_dir, launch.loaded.settings.launch.max_restarts
    newest: Path | None = None
    for number in range(most + 1):
        with printing(printer_out, launch.arguments, launch.context.run_dir) as printer:
            if number:
                printer.say(f"restart {number} of {most}: {_from_where(launch)}")
            else:
                greet(launch, printer)
            run = Run(launch, printer, argv)
            result = run.carry_out(may_go_on if number < most else lambda *_: False)
            if not run.all_go_on:
                _tell_why_not(run.end, result, number < most, printer)
                break
        newest = run.newest_checkpoint or newest
        launch = _again(launch, directory, number + 1, newest)
    return result.exit_code


def may_go_on(end: RunEnd, exit_code: int) -> bool:
    """As far as this node knows."""
    asked = end.is_by_signal or end.is_deadline
    return exit_code not in _FINAL and not asked and not end.leftovers


def _tell_why_not(end: RunEnd, result: RunResult, may_more: bool, printer: Printer) -> None:
    if may_more and may_go_on(end, result.exit_code):
        printer.say("no restart: another node of the job does not go on, or is gone")


def _from_where(launch: Launch) -> str:
    if launch.nodes is not None and launch.nodes.node > 0:
        return f"{launch.nodes.names[0]} chooses where the job goes on"
    return f"the job goes on from {launch.goes_on_from or 'the start: no checkpoint was written'}"


def _again(launch: Launch, directory: Path, number: int, checkpoint: Path | None) -> Launch:
    """The same job, from there; a drill is over. Where nothing was written, it begins as it did."""
    path = run_dir.restart_path(directory, number)
    launch.absence.expect(launch.nodes, launch.context.environ, path.name)
    launch = replace(launch.in_directory(run_dir.create(path)), goes_on_from=checkpoint)
    settings = launch.loaded.settings
    settings = replace(settings, debug=replace(settings.debug, drill=None))
    launch = replace(launch, loaded=replace(launch.loaded, settings=settings))
    return launch if checkpoint is None else resumed_from(launch, str(checkpoint))
