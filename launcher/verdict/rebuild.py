"""`report RUN_DIR ...`: the reports of finished runs, made again from what the runs left behind."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.verdict import report
from launcher.verdict.closing import closing_lines
from launcher.verdict.history import History
from launcher.verdict.judge import Ended, RunEnd, RunResult, judge
from launcher.verdict.watch import Watch
from model_check.errors import EXIT_INTERNAL, UsageError
from model_check.events import Event, decode


def rebuild(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Rebuild each run's report and print it. Returns the first exit code that is not 0."""
    if not argv or argv[0].startswith("-"):
        raise UsageError("report: give one run directory or more: `report RUN_DIR ...`")
    results = [(Path(name), _rebuilt(Path(name))) for name in argv]
    for directory, result in results:
        report.write(result, directory)
        for line in closing_lines(result, directory, tail_lines=0):
            write(f"[launcher] {line}")
    return next((result.exit_code for _, result in results if result.exit_code), 0)


def _rebuilt(directory: Path) -> RunResult:
    run = _read_run(directory)
    watch = Watch(run["groups"])
    for name in run["groups"]:
        for event in _events(directory / f"{name.lower()}.events.jsonl"):
            watch.on_event(name, event)
    if "end" in run:
        end = msgspec.convert(run.pop("end"), RunEnd)
        ended = msgspec.convert(run.pop("ended"), list[Ended])
    else:  # the supervisor itself was killed: its workers' ends are unknown
        end = RunEnd(exit_code=EXIT_INTERNAL, reason="the launcher did not live to see the end")
        ended = [_unknown(name, watch.histories[name]) for name in run["groups"]]
    histories = {worker.name: watch.histories.get(worker.name, History()) for worker in ended}
    return judge(run, end, ended, histories, watch.agreed_steps)


def _unknown(name: str, history: History) -> Ended:
    code = history.done.exit_code if history.done else None
    return Ended(name=name, pid=None, returncode=code, stopped_by_us=False, duration_s=0.0)


def _read_run(directory: Path) -> dict[str, Any]:
    path = directory / "run.json"
    try:
        run: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UsageError(f"{path}: not a run directory: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: not a run of ours: {error}") from error
    if run.get("schema") != 1 or "groups" not in run:
        raise UsageError(f"{path}: written by another version (schema {run.get('schema')!r})")
    return run


def _events(path: Path) -> Iterator[Event]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield decode(line)
        except msgspec.DecodeError:
            continue  # the last line of a run that was cut short
