"""The table of workers that ends a run: its columns, and its lines on a terminal. Pure."""

from collections.abc import Sequence

from launcher.verdict.results import WorkerResult

COLUMNS = ("worker", "verdict", "steps", "loss first", "last", "tokens/s", "peak memory", "time")
_NUM_LEFT = 2
"""The first two columns hold words and start at the left; the others hold numbers."""
_GAP = "   "


def table(workers: Sequence[WorkerResult]) -> list[str]:
    """The lines of the closing table, without a prefix."""
    rows = [row(worker) for worker in workers]
    widths = [max(map(len, cells)) for cells in zip(COLUMNS, *rows, strict=True)]
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return [_line(COLUMNS, widths), rule, *(_line(cells, widths) for cells in rows)]


def row(worker: WorkerResult) -> tuple[str, ...]:
    """One worker's cells, as the table and the page show them."""
    peak_bytes = worker.peak_memory_bytes
    return (
        worker.name,
        str(worker.verdict),
        str(worker.steps),
        number(worker.loss_first),
        number(worker.loss_last),
        number(worker.tokens_per_s, "{:,.0f}"),
        number(peak_bytes and peak_bytes / 2**30, "{:.2f} GiB"),
        f"{worker.duration_s:.1f} s",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if at < _NUM_LEFT else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join(padded).rstrip()


def number(value: float | str | None, form: str = "{:.4f}") -> str:
    """A figure in this form. One that is not finite is text already; one that is unknown is n/a."""
    if value is None:
        return "n/a"
    return value if isinstance(value, str) else form.format(value)
