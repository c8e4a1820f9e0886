"""This draws a run as it goes, a row for each worker: below its own lines, and in `watch`."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from launcher.report.progress import RunProgress, Watched, WatchedComparison, WorkerProgress
from launcher.telemetry.health import symptoms
from launcher.verdict.severity import Severity, worst
from model_check.events import Metrics, Step, Telemetry
from model_check.utils.words import printable

_BAR = 8
_QUIET_S = 10.0
"""A worker that says nothing for so long, and for much longer than its steps take, may hang."""
_MANY_STEPS = 4
_STYLES = {Severity.ISOLATE: "bold red", Severity.RESET: "bold red", Severity.MONITOR: "yellow"}
Cell = Callable[[WorkerProgress], str]
_COLUMNS: tuple[tuple[str, int, Cell], ...] = (
    ("step", 0, lambda w: _number(w.step, "{:,}")),
    ("loss", 0, lambda w: _number(_float(_told(w.last, "loss")), "{:.4f}")),
    ("norm", 100, lambda w: _number(_float(_told(w.last, "grad_norm")), "{:.3f}")),
    ("tok/s", 0, lambda w: _number(_told(w.metrics, "tokens_per_s"), "{:,.0f}")),
    ("MFU", 100, lambda w: _number(_told(w.metrics, "mfu_full"), "{:.0%}")),
    ("util", 0, lambda w: _number(_told(w.sample, "utilization_percent"), "{}%")),
    ("°C", 0, lambda w: _number(_told(w.sample, "temperature_c"), "{}")),
    ("W", 0, lambda w: _number(_told(w.sample, "power_w"), "{:.0f}")),
    ("GiB", 0, lambda w: _number(_gib(_told(w.metrics, "memory_bytes")), "{:.1f}")),
)
"""Title, from how many columns of the terminal on, cell. What is unknown of every worker has no
column."""
_TITLES = [title for title, _, _ in _COLUMNS]
_SPARE = ("", "tok/s", "W", "GiB", "GPU", "MFU", "norm", "util", "loss")
"""The first to go where what is to be said of a worker has no room."""
_LEAST_NOTE = 18
_GRAVITY = {"bold red": 0, "yellow": 1}
"""Style of what is said of a worker -> its place where not all have one."""
Line = tuple[Text, ...]
Column = tuple[str, list[Text]]
"""Title, and a cell for each worker."""


class LiveTable:
    """It looks at directories of runs and comparisons again each time. This file alone imports
    rich, which takes 0.1 s: for a terminal, and when the workers have begun."""

    def __init__(self, them: Sequence[Watched | WatchedComparison]) -> None:
        self._them = them
        self._consoles = {
            has_colours: Console(file=io.StringIO(), force_terminal=has_colours, highlight=False)
            for has_colours in (False, True)
        }

    @property
    def is_over(self) -> bool:
        return all(each.is_over for each in self._them)

    def lines(
        self, columns: int, rows: int | None = None, *, has_colours: bool = True
    ) -> list[str]:
        """Returns all runs as a terminal of this width shows them. `rows`: no more than so many."""
        runs = self._look()
        room = None if rows is None or not runs else rows // len(runs) - 2
        parts = [part for run in runs for part in _parts(run, columns, room)]
        parts = parts or [Text("no training has begun yet")]
        return self._printed(parts, columns, has_colours)[:rows]

    def own_lines(self, columns: int, rows: int) -> list[str]:
        """Returns the runs that go on, for their own terminal: a run, or arms, which have names."""
        going = [run for run in self._look() if run.verdict is None]
        room, are_several = rows // max(1, len(going)), len(going) > 1
        tables = [run_table(run, columns, room, is_named=are_several) for run in going]
        return self._printed(tables, columns, True)[:rows]

    def close(self) -> None:
        for each in self._them:
            each.close()

    def _look(self) -> list[RunProgress]:
        for each in self._them:
            each.look()
        return [run for each in self._them for run in each.runs]

    def _printed(
        self, parts: Sequence[RenderableType], columns: int, has_colours: bool
    ) -> list[str]:
        console, text = self._consoles[has_colours], io.StringIO()
        console.file, console.width = text, columns
        console.print(Group(*parts))
        return [line.rstrip() for line in text.getvalue().splitlines()]


def _parts(run: RunProgress, columns: int, rows: int | None) -> Iterator[RenderableType]:
    yield run_table(run, columns, rows, is_named=True)
    yield Text(run.verdict or "")
    yield Text()


def run_table(
    run: RunProgress, width: int, rows: int | None = None, *, is_named: bool
) -> RenderableType:
    """Returns a title, and a row for each worker, in so many rows; None: as many as it takes. Where
    there is no room for all, workers of which there is something to say come first. `is_named`:
    the title tells its directory."""
    columns, gap = _columns(run, width), 2 if width >= 100 else 1
    room = width - sum(gap + _width(column) for column in columns)
    while room < _LEAST_NOTE and (spare := next(filter(_is_spare, reversed(columns)), None)):
        columns.remove(spare)
        room += gap + _width(spare)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for title, cells in columns:
        is_number = title in _TITLES
        table.add_column(
            title, justify="right" if is_number else "left", min_width=_width((title, cells))
        )
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=max(1, room))
    equal_steps, now_ns = run.equal_steps, time.monotonic_ns()
    notes = [next(_notes(n, run, equal_steps.get(n, 0), now_ns)) for n in run.workers]
    lines = list(zip(*(cells for _, cells in columns), notes, strict=True))
    shown, more = _shown(lines, rows)
    for line in shown:
        table.add_row(*line)
    head = Text(_title(run, is_named), style="bold", overflow="fold")
    return Group(head, table, *([Text(f"... {more} more workers")] if more else []))


def _shown(lines: Sequence[Line], rows: int | None) -> tuple[Sequence[Line], int]:
    """Returns the lines that fit below title and head, and how many do not."""
    room = len(lines) if rows is None else rows - 2
    if len(lines) <= room:
        return lines, 0
    grave = sorted(lines, key=lambda line: _GRAVITY.get(str(line[-1].style), len(_GRAVITY)))
    room = max(1, room - 1)
    return grave[:room], len(lines) - room


def _columns(run: RunProgress, width: int) -> list[Column]:
    """Returns the columns of which something is known and that this width has room for."""
    workers, steps = list(run.workers.values()), run.record.steps
    found: list[Column] = [("worker", [Text(name) for name in run.workers])]
    if width >= 120:
        found.append(("GPU", _models(run)))
    if steps:
        found.append(("", [_bar(worker.step, steps) for worker in workers]))
    for title, at_least, cell in _COLUMNS:
        if width >= at_least:
            found.append((title, [Text(cell(worker)) for worker in workers]))
    return [(title, cells) for title, cells in found if any(cells)]


def _is_spare(column: Column) -> bool:
    return column[0] in _SPARE


def _width(column: Column) -> int:
    title, cells = column
    return max(len(title), *map(len, cells))


def _models(run: RunProgress) -> list[Text]:
    gpus = (run.record.gpus.get(name, {}) for name in run.workers)
    return [Text(printable(str(gpu.get("name", "")).removeprefix("NVIDIA "))) for gpu in gpus]


def _bar(step: int | None, steps: int) -> Text:
    full = 0 if step is None else round(_BAR * min(1.0, (step + 1) / steps))
    return Text.assemble(("━" * full, "green"), ("─" * (_BAR - full), "dim"))


def _notes(name: str, run: RunProgress, equal_steps: int, now_ns: int) -> Iterator[Text]:
    """Yields what is to be said of a worker, the gravest first; in the end what it does."""
    worker = run.workers[name]
    found = symptoms(name, health) if (health := worker.gpu.health()) is not None else []
    gravest = worst(found) if found else None
    if gravest is not None and gravest.is_hard:
        yield Text(printable(gravest.figure), style=_STYLES[gravest.severity])
    if (step := run.differs.get(name)) is not None:
        yield Text(f"differs at step {step}", style="bold red")
    facts = worker.facts
    if facts.nonfinite is not None:
        yield Text(f"not finite at step {facts.nonfinite.step}", style="bold red")
    if facts.broken is not None:
        yield Text("its state changed by itself", style="bold red")
    if run.verdict is None and (quiet_s := _quiet_s(worker, now_ns)) is not None:
        others = any(each.is_ahead_of(worker) for each in run.workers.values())
        waits = ": the others wait for it" if others else ""
        yield Text(f"silent for {quiet_s:.0f} s{waits}", style="yellow")
    if gravest is not None:
        yield Text(printable(gravest.figure), style=_STYLES[gravest.severity])
    # A command of your own tells nothing.
    unheard = "" if run.record.steps is None else "waiting"
    state = facts.state or unheard
    if state == "train" and equal_steps:
        yield Text(f"equal, {equal_steps:,} steps", style="green")
    yield Text(state or worker.last_line, style="bold red" if state.startswith("exit ") else "")


def _quiet_s(worker: WorkerProgress, now_ns: int) -> float | None:
    """Returns how long a worker that trains has said nothing; None: not unusually long."""
    if worker.facts.state != "train" or worker.facts.is_finished or not worker.recent:
        return None
    quiet_s = (now_ns - worker.heard_ns) / 1e9
    last_s = 0.0 if worker.last is None else worker.last.ms / 1000
    usual_s = _MANY_STEPS * (worker.step_s or last_s)
    return quiet_s if quiet_s > max(_QUIET_S, usual_s) else None


def _title(run: RunProgress, is_named: bool) -> str:
    steps = [worker.step for worker in run.workers.values() if worker.step is not None]
    parts = [printable(str(run.directory))] if is_named else []
    if run.record.drill:
        parts.append(f"DRILL {printable(run.record.drill)}")
    if steps and run.record.steps is not None:
        parts.append(f"{min(steps) + 1:,} of {run.record.steps:,} steps")
    if run.eta_s is not None:
        parts.append(f"ETA {_minutes(run.eta_s)}")
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
