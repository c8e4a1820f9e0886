"""`watch [RUN_DIR ...]`: runs as they go, as a table that is drawn again while something is new."""

import io
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher import run_dir
from launcher.report.comparison import begun, read_comparison
from launcher.report.progress import RunProgress, WorkerProgress
from launcher.report.read_run import is_running, read_conclusion
from model_check.config.arguments import Parser
from model_check.errors import EXIT_PASS, UsageError
from model_check.events import Metrics, Step, Telemetry
from model_check.utils.project_files import COMMAND
from model_check.utils.standard_streams import put
from model_check.utils.words import printable

_LATEST = Path(".logs/latest")
_EVERY_S = 1.0
_ABOUT = """\
Watch runs while they go: phase, step, loss, speed, heat. From their files alone, so
over ssh and as often as you like; a run does not notice. `q` ends the watching.
"""
_HELP = """
examples:
  bash run.sh watch                 the newest run from here (.logs/latest)
  bash run.sh watch RUN_DIR ...     these, in one table each
"""
Cell = Callable[[WorkerProgress], str]
_COLUMNS: tuple[tuple[str, int, Cell], ...] = (
    ("step", 0, lambda w: _number(w.step, "{:,}")),
    ("loss", 0, lambda w: _number(_float(_told(w.last, "loss")), "{:.4f}")),
    ("norm", 0, lambda w: _number(_float(_told(w.last, "grad_norm")), "{:.3f}")),
    ("tokens/s", 0, lambda w: _number(_told(w.metrics, "tokens_per_s"), "{:,.0f}")),
    ("MFU", 0, lambda w: _number(_told(w.metrics, "mfu_full"), "{:.1%}")),
    ("°C", 0, lambda w: _number(_told(w.sample, "temperature_c"), "{}")),
    ("W", 0, lambda w: _number(_told(w.sample, "power_w"), "{:.0f}")),
    ("GiB", 0, lambda w: _number(_gib(_told(w.metrics, "memory_bytes")), "{:.1f}")),
    ("last line", 110, lambda w: w.last_line),
)
"""Title, from how many columns of the terminal on, cell. What is unknown of every worker has no
column."""


class Watched:
    """A run: of several rounds the newest, of a job that was restarted what went on last."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError where no run is."""
        self._directory = directory
        self.run = RunProgress(run_dir.newest_part(directory))

    def look(self) -> bool:
        """Whether anything is new."""
        newest = run_dir.newest_part(self._directory)
        if newest == self.run.directory or not (newest / "run.json").exists():
            return self.run.look()
        self.close()
        self.run = RunProgress(newest)
        return self.run.look() or True

    @property
    def is_over(self) -> bool:
        if self.run.verdict is None:
            return False
        if run_dir.rounds_in(self._directory) and read_conclusion(self._directory):
            return True
        record = self.run.record
        may_restart = bool((record.asked_for or {}).get("launch.max_restarts"))
        is_part = self.run.directory != self._directory
        return not ((is_part or may_restart) and is_running(record))

    @property
    def runs(self) -> list[RunProgress]:
        return [self.run]

    def close(self) -> None:
        self.run.close()


class WatchedComparison:
    """A comparison: the trainings that have begun."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError where its record is damaged."""
        self._directory, self._record = directory, read_comparison(directory)
        self._trials: dict[Path, RunProgress] = {}

    @property
    def runs(self) -> list[RunProgress]:
        return list(self._trials.values())

    def look(self) -> bool:
        """Whether anything is new."""
        have_begun = begun(self._record, self._directory)
        new = [path for path in have_begun if path not in self._trials]
        self._trials |= {path: RunProgress(path) for path in new}
        return any([run.look() for run in self.runs]) or bool(new)

    @property
    def is_over(self) -> bool:
        return not is_running(self._record)

    def close(self) -> None:
        for run in self.runs:
            run.close()


def _watched(directory: Path) -> Watched | WatchedComparison:
    """Raises UsageError where no run is."""
    is_comparison = run_dir.is_comparison(directory)
    return WatchedComparison(directory) if is_comparison else Watched(directory)


def watch(argv: Sequence[str]) -> int:
    """Until all runs are over or somebody types q. Returns 0. Raises UsageError."""
    runs = [_watched(path) for path in _directories(argv)]
    console = Console(highlight=False)
    try:
        if console.is_terminal and sys.stdin.isatty():
            _follow(runs, console)
        else:
            _look(runs)
        put(_text(runs, console), end="")
    finally:
        for run in runs:
            run.close()
    return EXIT_PASS


def _directories(argv: Sequence[str]) -> list[Path]:
    parser = Parser(usage=f"{COMMAND} watch [RUN_DIR ...]", description=_ABOUT, epilog=_HELP)
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help=str(_LATEST))
    found: list[Path] = parser.read(argv).run_dirs
    if not found and not os.path.lexists(_LATEST):
        raise UsageError(f"watch: no run was started from here ({_LATEST}); give a run directory")
    return found or [_LATEST.resolve()]


def _follow(runs: Sequence[Watched | WatchedComparison], console: Console) -> None:
    """Draw while something is new, and until nothing can be."""
    _look(runs)
    with _keys() as stdin, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(_drawn(runs, console.width), refresh=True)
        while not all(run.is_over for run in runs):
            ready, _, _ = select.select([stdin], [], [], _EVERY_S)
            if ready and os.read(stdin, 1) in (b"q", b"Q", b"\x03", b""):
                return
            if _look(runs):
                live.update(_drawn(runs, console.width), refresh=True)


def _look(runs: Sequence[Watched | WatchedComparison]) -> bool:
    """Whether anything is new in one of them."""
    return any([run.look() for run in runs])


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, key by key, without echo."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield stdin
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _drawn(watched: Sequence[Watched | WatchedComparison], width: int) -> Group:
    runs = [run for each in watched for run in each.runs]
    parts = [part for run in runs for part in _parts(run, width)]
    return Group(*(parts or [Text("no training has begun yet")]))


def _text(watched: Sequence[Watched | WatchedComparison], terminal: Console) -> str:
    """What `terminal` would show: it has manners of its own where a disk is full."""
    text = io.StringIO()
    console = Console(file=text, width=terminal.width, force_terminal=terminal.is_terminal)
    console.print(_drawn(watched, terminal.width), highlight=False)
    return text.getvalue()


def _parts(run: RunProgress, width: int) -> Iterator[Text | Table]:
    yield Text(_title(run), style="bold")
    yield _table(run, width)
    if run.verdict is not None:
        yield Text(run.verdict)
    yield Text()


def _table(run: RunProgress, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = [(name, cell) for name, at_least, cell in _COLUMNS if width >= at_least]
    cells = {name: [cell(worker) for worker in run.workers.values()] for name, cell in columns}
    # A command of your own tells nothing.
    unheard = "" if run.record.steps is None else "waiting"
    cells["phase"] = [worker.facts.state or unheard for worker in run.workers.values()]
    shown = [name for name in ("phase", *dict(columns)) if any(cells[name])]
    table.add_column("worker", no_wrap=True)
    for name in shown:
        is_text = name in ("phase", "last line")
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis"
        )
    for worker, *row in zip(run.workers, *(cells[name] for name in shown), strict=True):
        table.add_row(worker, *map(Text, row))
    return table


def _title(run: RunProgress) -> str:
    steps = [worker.step for worker in run.workers.values() if worker.step is not None]
    parts = [printable(str(run.directory))]
    if run.record.drill:
        parts.append(f"DRILL {printable(run.record.drill)}")
    if steps and run.record.steps is not None:
        parts.append(f"step {min(steps) + 1:,} of {run.record.steps:,}")
    if run.eta_s is not None:
        parts.append(f"ETA {_minutes(run.eta_s)}")
    if run.verdict is None:
        parts.append("q: leave")
    return " · ".join(parts)


def _minutes(seconds: float) -> str:
    """`m:ss`, `h:mm:ss` past an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _told(event: Metrics | Step | Telemetry | None, name: str) -> Any:
    """None: there was no such event, or it did not tell."""
    return None if event is None else getattr(event, name)


def _float(bits: str | None) -> float | None:
    return None if bits is None else float.fromhex(bits)


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30
