"""A RunResult for people and machines: report.json, the table that ends a run, report.html."""

import io
from pathlib import Path

import msgspec

from launcher import run_dir
from launcher.verdict.results import RunResult, WorkerResult

_COLUMNS = ("worker", "verdict", "steps", "loss first", "last", "tokens/s", "peak memory", "time")


def write(result: RunResult, directory: Path) -> None:
    """report.json and report.html, each whole or not at all. Raises StorageError."""
    run_dir.write(directory / "report.json", msgspec.to_builtins(result))
    run_dir.write(directory / "report.html", _html(result))


def table(result: RunResult) -> list[str]:
    """The lines of the closing table, without a prefix."""
    from rich import box  # 60 ms, at the end of a run
    from rich.console import Console
    from rich.table import Table

    grid = Table(*_COLUMNS, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in grid.columns[2:]:
        column.justify = "right"
    for worker in result.workers:
        grid.add_row(*row(worker))
    text = io.StringIO()
    Console(file=text, width=160, no_color=True).print(grid)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def row(worker: WorkerResult) -> tuple[str, ...]:
    """One worker's cells, as the table and the page show them."""
    return (
        worker.name,
        str(worker.verdict),
        str(worker.steps),
        _loss(worker.loss_first),
        _loss(worker.loss_last),
        "n/a" if worker.tokens_per_s is None else f"{worker.tokens_per_s:,.0f}",
        "n/a"
        if worker.peak_memory_bytes is None
        else f"{worker.peak_memory_bytes / 2**30:.2f} GiB",
        f"{worker.duration_s:.1f} s",
    )


def _loss(value: float | str | None) -> str:
    if value is None:
        return "n/a"
    return value if isinstance(value, str) else f"{value:.4f}"


def _html(result: RunResult) -> str:
    from jinja2 import Environment, FileSystemLoader  # 40 ms, at the end of a run

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    return templates.get_template("report.html.j2").render(
        result=result, columns=_COLUMNS, rows=[(worker, row(worker)) for worker in result.workers]
    )
