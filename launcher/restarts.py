"""A job of ranks that failed goes on from its newest checkpoint (launch.max_restarts): each attempt
is a run in a directory of its own below the first one's."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from launcher import run_dir
from launcher.launch import Launch
from launcher.run import begin, greet, printing, run_one
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

_CHECKPOINT = re.compile(r"(last|step_\d+)\.pt")
_FINAL = (EXIT_PASS, EXIT_USAGE, EXIT_HEALTH, EXIT_NO_GPU, EXIT_INTERNAL, EXIT_UNPROVEN)
"""A restart would change nothing of what these tell."""


def run_with_restarts(launch: Launch, argv: Sequence[str], printer_out: int) -> int:
    """Do it. Returns the exit code of the last attempt. Raises ModelCheckError."""
    launch = begin(launch)
    directory, most = launch.context.run_dir, launch.loaded.settings.launch.max_restarts
    with printing(printer_out, directory) as printer:
        greet(launch, printer)
        end, result = run_one(launch, argv, printer)
    for number in range(1, most + 1):
        if not _may_go_on(end, result.exit_code):
            break
        checkpoint = _newest(launch, result)
        path = run_dir.create(run_dir.restart_path(directory, number))
        launch = _again(launch, path, checkpoint)
        with printing(printer_out, path) as printer:
            where = "the start: no checkpoint was written" if checkpoint is None else checkpoint
            printer.say(f"restart {number} of {most}: the job goes on from {where}")
            end, result = run_one(launch, argv, printer)
    return result.exit_code


def _may_go_on(end: RunEnd, exit_code: int) -> bool:
    asked = end.is_by_signal or end.is_deadline
    return exit_code not in _FINAL and not asked and not end.leftovers


def _again(launch: Launch, directory: Path, checkpoint: Path | None) -> Launch:
    """The same job, from there; a drill is over. Where nothing was written, it begins as it did."""
    settings = launch.loaded.settings
    resume = settings.training.resume if checkpoint is None else str(checkpoint)
    settings = replace(
        settings,
        training=replace(settings.training, resume=resume),
        debug=replace(settings.debug, drill=None),
    )
    loaded = replace(launch.loaded, settings=settings)
    return replace(launch.in_directory(directory), loaded=loaded)


def _newest(launch: Launch, result: RunResult) -> Path | None:
    """The last checkpoint that the job has written since its first attempt began, in the directory
    that its ranks have told; another job may be in the usual one."""
    told = [worker.detail.get("checkpoints") for worker in result.workers]
    directory = next(filter(None, told), None)
    written: list[tuple[float, Path]] = []
    for path in Path(str(directory)).glob("*.pt") if directory else ():
        if _CHECKPOINT.fullmatch(path.name):
            with suppress(OSError):  # it was removed right now
                written.append((path.lstat().st_mtime, path.absolute()))
    own = [each for each in written if each[0] >= launch.started_at]
    return max(own, default=(0.0, None))[1]
